"""Which runtimes there are, and what jobs get of them that say nothing else.

Settings map the name of a runtime to what it should be. `process`, `thread`, `lambda`, `spark` and
`sink` are always there; others come from installed packages, by the entry point group
`penstock.runtimes`: an object that makes a `Runtime` of its settings.

    {
        "process": {"path": ["jobs"], "resources": {"memory": "2GiB"}},
        "process-big": {"uses": "process", "image": "worker:7", "resources": {"memory": "32GiB"}},
    }

Of the settings of a runtime these are the registry's own: `uses`, for another runtime under a new
name; `queue`, in which its tasks wait for workers that serve it; `image` and `command`, of which
`penstock deploy` makes the workers of that queue. Everything else is the runtime's. A runtime under
a new name has a queue of that name unless it says another. A job overrides the queue and every
resource by its `resources`; images belong to runtimes.

A runtime is made when it is first asked for, and once. Made by `app`, for the worker (`runtime`)
and, through `penstock.dispatcher.runtime_registry`, for the dispatcher.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.kernel.text import nearest
from penstock.kernel.validation import wrong_shape
from penstock.runtimes import DEFAULT_QUEUE
from penstock.runtimes.base import Runtime
from penstock.runtimes.function import function
from penstock.runtimes.process import process
from penstock.runtimes.sink import sink
from penstock.runtimes.spark.runtime import spark
from penstock.runtimes.thread import thread

Factory = Callable[[Mapping[str, Any]], Runtime]

GROUP: Final = "penstock.runtimes"
DISPATCHER: Final = "dispatcher"
_PLACING: Final = ("image", "command", "queue")
"""What a runtime's settings say about workers."""
_QUEUE: Final = re.compile(r"[a-z0-9_-]{1,64}")
_FUNCTIONS: Final = "lambda"
_BUILT_IN: Final[Mapping[str, Factory]] = {
    "process": process,
    "sink": sink,
    _FUNCTIONS: function,
    "spark": spark,
    "thread": thread,
}


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be there for a job: which worker, and what it provides."""

    image: str = ""
    """The image of its workers; empty for that of Penstock."""
    command: tuple[str, ...] = ()
    """What a container of it runs instead of `worker`."""
    queue: str = DEFAULT_QUEUE
    resources: dict[str, Any] = {}


class _Entry(msgspec.Struct, frozen=True):
    factory: Factory
    uses: str
    settings: Mapping[str, Any]
    placement: Placement


class RuntimeRegistry:
    """The runtimes of this process."""

    def __init__(
        self,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        installed: Sequence[EntryPoint] | None = None,
    ) -> None:
        """`installed` is what packages bring; by default those of this interpreter."""
        points = entry_points(group=GROUP) if installed is None else installed
        factories = {**_third_party(points), **_BUILT_IN}
        said: dict[str, Mapping[str, Any]] = {name: {} for name in factories}
        said.update(settings or {})
        self._entries = {name: _entry(name, each, factories) for name, each in said.items()}
        self._made: dict[str, Runtime] = {}

    def names(self) -> tuple[str, ...]:
        """All runtimes, sorted."""
        return tuple(sorted(self._entries))

    def runtime(self, name: str) -> Runtime:
        """The runtime of this name, made once."""
        if name not in self._made:
            entry = self._entry(name)
            made = entry.factory(entry.settings)
            made.name = name
            self._made[name] = made
        return self._made[name]

    def placement(self, name: str, resources: Mapping[str, Any]) -> Placement:
        """What a job that asks for these resources gets."""
        ours = self._entry(name).placement
        asked = dict(resources)
        queue = asked.pop("queue", ours.queue)
        said = {**msgspec.to_builtins(ours), "resources": {**ours.resources, **asked}}
        _check_queue(queue, self._entry(name).uses)
        return _placement({**said, "queue": queue}, f"The resources of a job of the runtime {name}")

    def uses(self, name: str) -> str:
        """The runtime that executes what a runtime of this name is given."""
        return self._entry(name).uses

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise InvalidInput(
                f"There is no runtime {name!r}; there are {', '.join(self.names())}.",
                hint="Add it to the settings, or install the package that brings it.",
            )
        return self._entries[name]


def _entry(name: str, said: Mapping[str, Any], factories: Mapping[str, Factory]) -> _Entry:
    if name == DISPATCHER:
        raise InvalidInput(f"The runtime {DISPATCHER} is part of the platform and has no settings.")
    uses = said.get("uses", name)
    if uses not in factories:
        near = nearest(str(uses), factories)
        meant = f"Is {near} meant? " if near else ""
        raise InvalidInput(
            f"The runtime {name} would use {uses!r}, which is not there;"
            f" there are {', '.join(sorted(factories))}.",
            hint=f"{meant}Write `uses` in the settings of {name}, or install what brings {uses!r}.",
        )
    if uses == _FUNCTIONS != name:
        # Tasks of this very name are invoked at AWS; another name would only be woken.
        raise InvalidInput(f"The runtime lambda has no other names; {name!r} cannot use it.")
    placing = {key: said[key] for key in (*_PLACING, "resources") if key in said}
    if uses == _FUNCTIONS and (wrong := [key for key in _PLACING if key in said]):
        raise InvalidInput(
            f"The runtime {name} has {wrong[0]!r}, and functions have no workers of their own.",
            hint="Take it out, or give it to another runtime.",
        )
    placing.setdefault("queue", DEFAULT_QUEUE if uses == name else name)
    own = {key: value for key, value in said.items() if key not in (*_PLACING, "uses")}
    placement = _placement(placing, f"The settings of the runtime {name}")
    _check_queue(placement.queue, uses)
    return _Entry(factories[uses], uses, own, placement)


def _check_queue(queue: object, uses: str) -> None:
    if not isinstance(queue, str) or not _QUEUE.fullmatch(queue):
        raise InvalidInput(
            f"{str(queue)[:100]!r} is no name of a queue; write one of a-z, 0-9, _ and -,"
            " of 64 characters at most."
        )
    if uses == _FUNCTIONS and queue != DEFAULT_QUEUE:
        raise InvalidInput("Functions are invoked, and wait in no queue; take `queue` out.")


def _placement(said: Mapping[str, Any], what: str) -> Placement:
    try:
        return msgspec.convert(dict(said), Placement)
    except msgspec.ValidationError as error:
        field, words = wrong_shape(error)
        raise InvalidInput(f"{what} are wrong: {field!r} {words}.") from error


def _third_party(points: Sequence[EntryPoint]) -> Mapping[str, Factory]:
    found: dict[str, Factory] = {}
    for point in points:
        if point.name in found or point.name in _BUILT_IN or point.name == DISPATCHER:
            raise InvalidInput(
                f"The package of {point.value} brings a runtime {point.name}, which is there"
                " already; take one of them out."
            )
        found[point.name] = _loading(point)
    return found


def _loading(point: EntryPoint) -> Factory:
    """The factory of an entry point, imported when it is first used."""

    def factory(settings: Mapping[str, Any]) -> Runtime:
        try:
            made = point.load()(settings)
        except (ImportError, AttributeError, TypeError) as error:
            raise InvalidInput(
                f"The runtime {point.name} cannot be made by {point.value}: {error}."
            ) from error
        if not isinstance(made, Runtime):
            raise InvalidInput(f"{point.value} does not make a runtime, but {made!r}.")
        return made

    return factory
