"""What a page is: a path, what is asked of the dispatcher for it, and how that is rendered.

A page has a template of its name. The blocks of the template that are named in `live` are rendered
again about once a second while somebody looks, and what has changed is sent; each stands in an
element with the attribute `data-live` and the name of the block. So `load` is asked often, and must
be cheap: a few short questions, each with a bound. It changes nothing.

An action is what a form does. It is given the fields of the form, calls the same handler as the API
does, and says what has become of it; the browser is sent to a page that shows it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Generic, TypeVar

from penstock.console.sessions import Session

Given_contra = TypeVar("Given_contra", contravariant=True)
"""What a page asks: the parts of a dispatcher, or as much of them as it needs."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a page, or a form."""

    path: Mapping[str, str]
    """The parameters of the path, unescaped."""
    query: Mapping[str, str]
    """What stands in the query, or in the fields of a form."""
    session: Session


@dataclass(frozen=True, slots=True)
class Missing:
    """There is no such thing: a sentence about what is not there, and what to do."""

    what: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an action: a sentence, and where to look at it."""

    told: str
    to: str
    is_well: bool = True


_RESERVED: Final = frozenset({"open", "error", "message", "trouble", "heartbeat"})

Loaded = Mapping[str, Any] | Missing
"""What the template of a page is given."""


@dataclass(frozen=True, slots=True)
class Page(Generic[Given_contra]):
    """One page. A path has parameters as `{name}`; `{name:path}` is one that may have slashes.

    Where a parameter is the last, it is of that kind: what has slashes in it is then told to be no
    job, or no task, rather than no page.
    """

    path: str
    name: str
    """Its template is `{name}.html`; the navigation marks it by this, or by `section`."""
    load: Callable[[Given_contra, Asked], Awaitable[Loaded]]
    _: KW_ONLY
    live: tuple[str, ...] = ()
    """The blocks of the template that are kept up to date."""
    section: str = ""
    query: tuple[str, ...] = ()
    """The parameters that it understands; others are left out."""

    def __post_init__(self) -> None:
        # An event of such a name is the browser's own, or the stream's.
        assert not _RESERVED.intersection(self.live), "a live block needs another name"


@dataclass(frozen=True, slots=True)
class Action(Generic[Given_contra]):
    """What the forms of a path do; for operators only."""

    path: str
    act: Callable[[Given_contra, Asked, str], Awaitable[Done]]
    """The last is the page that the form says to go to afterwards."""
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Site(Generic[Given_contra]):
    """All pages and actions."""

    pages: tuple[Page[Given_contra], ...]
    actions: tuple[Action[Given_contra], ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    """The navigation: names, and the paths of their pages."""
