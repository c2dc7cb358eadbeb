"""Which tasks are meant, by their tags. Pure.

| form | holds for a task that |
|---|---|
| `name=value` | has the tag with this value; the value may be empty |
| `name!=value` | has it with another value, or has it not |
| `name` | has the tag, whatever its value |

Of several filters all must hold. Tags are in packs and ledgers and not in keys: to filter by them
costs the reads of the packs that are filtered, and never a write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.errors import InvalidInput
from penstock.kernel.words import listed, nearest, shown
from penstock.queue.options import TAG_CHARACTERS_MAX, TAG_NAME, TAGS_MAX

_FORM: Final = re.compile(rf"({TAG_NAME.pattern})(?:(!?=)(.*))?", re.DOTALL)
_HINT: Final = "Write name=value, name!=value, or name alone. Names have letters, digits, _ - and ."

TagFilters = Mapping[str, str | None] | Sequence[str]
"""Tags to filter by: `{"env": "prod"}`, None for any value; or forms such as `"env!=prod"`."""


@dataclass(frozen=True, slots=True)
class TagFilter:
    """One condition on the tags of a task."""

    name: str
    value: str | None = None
    """None: any value."""
    is_not: bool = False

    def holds(self, tags: Mapping[str, str]) -> bool:
        if self.value is None:
            return self.name in tags
        return (tags.get(self.name) == self.value) is not self.is_not


def tag_filters(given: TagFilters | None) -> tuple[TagFilter, ...]:
    """The filters that were asked for, or `InvalidInput`."""
    if given is None:
        return ()
    if isinstance(given, str):
        raise InvalidInput(
            f"{shown(given)} is one filter and not several.", hint=f"Write tags=[{given!r}]."
        )
    if len(given) > TAGS_MAX:
        raise InvalidInput(f"At most {TAGS_MAX} filters by tags are taken, not {len(given)}.")
    if isinstance(given, Mapping):
        return tuple(_pair(name, value) for name, value in given.items())
    return tuple(map(parsed, given))


def parsed(text: Any) -> TagFilter:
    """A filter from its form, or `InvalidInput`."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidInput(f"{shown(str(text))} is not a filter by a tag.", hint=_HINT)
    if (found[3] or "").startswith("="):
        # Nobody means a value that begins so; who does can say it as a mapping.
        raise InvalidInput(
            f"{shown(text)} has one '=' too many.",
            hint=f"Write {found[1]}{found[2]}{found[3].lstrip('=')}.",
        )
    return _checked(TagFilter(found[1], found[3], is_not=found[2] == "!="))


def _pair(name: Any, value: Any) -> TagFilter:
    if not isinstance(name, str) or not TAG_NAME.fullmatch(name):
        raise InvalidInput(
            f"{shown(str(name))} is not the name of a tag.",
            hint="Names have 1 to 50 letters, digits, '_', '-' and '.'.",
        )
    if value is not None and not isinstance(value, str):
        raise InvalidInput(
            f"The tag {name!r} cannot have the value {shown(str(value))}: tags are texts."
        )
    return _checked(TagFilter(name, value))


def _checked(made: TagFilter) -> TagFilter:
    if made.value is not None and len(made.value) > TAG_CHARACTERS_MAX:
        raise InvalidInput(
            f"No tag {made.name!r} is that long: texts have at most {TAG_CHARACTERS_MAX}"
            " characters."
        )
    return made


def unknown_tags(
    filters: Iterable[TagFilter], names: Iterable[str], *, among: str = "in sight"
) -> list[str]:
    """A sentence for each tag that is filtered by and that no task has `among` those looked at."""
    known = sorted(names)
    sentences = []
    for name in dict.fromkeys(each.name for each in filters):
        if name in known:
            continue
        meant = nearest(name, known)
        rest = f"; is {meant!r} meant?" if meant else f"; there are {listed(known)}."
        sentences.append(f"no task {among} has a tag {name!r}{rest if known else '.'}")
    return sentences
