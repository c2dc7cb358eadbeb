"""What the pages of queues share: the data that they read, their paths, how values look."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode

from penstock.console.pages.base import PageNotFound, PageRequest
from penstock.dispatcher.bucket_queues import READ_SECONDS_MAX, Found, QueueInspector, SharedAnswer
from penstock.kernel.errors import InvalidInput, PenstockError, QueueNotFound, TaskNotFound
from penstock.queue.client import Queue
from penstock.store.base import ObjectStore

NO_STORE: Final = "This dispatcher has no store."
_SECTIONS: Final = {
    "overview": "/queue",
    "tasks": "/queue/tasks",
    "limits": "/queue/limits",
    "schedules": "/queue/schedules",
    "batches": "/queue/batches",
}
_VALUE_CHARACTERS_MAX: Final = 20_000


class QueueParts(Protocol):
    """As much of a dispatcher, or of a console for a queue alone, as these pages ask."""

    @property
    def queues(self) -> QueueInspector | None: ...
    @property
    def store(self) -> ObjectStore | None: ...
    @property
    def root(self) -> str: ...
    @property
    def first_queue(self) -> str: ...
    @property
    def has_pipeline(self) -> bool: ...


def queues_of(parts: QueueParts) -> QueueInspector:
    """The queues, or `InvalidInput` where there are none."""
    if parts.queues is None:
        raise InvalidInput(NO_STORE)
    return parts.queues


def path(page: str, **query: str) -> str:
    """Where a page of a queue is; what is empty is left out."""
    return f"{page}?{urlencode({name: value for name, value in query.items() if value})}"


def task_path(name: str, id: str) -> str:
    """Where the page of a task is."""
    return path(f"/queue/task/{quote(id, safe='')}", name=name)


def way(name: str, here: str) -> list[tuple[str, str, bool]]:
    """The pages of a queue: their names, where they are, and which is this one."""
    return [
        (each.capitalize(), path(where, name=name), each == here)
        for each, where in _SECTIONS.items()
    ]


async def read(
    parts: QueueParts,
    asked: PageRequest,
    what: Hashable,
    make: Callable[[Queue], Awaitable[Found]],
    *,
    here: str,
    seconds: float,
    show: Callable[[Found], Mapping[str, Any]],
) -> Mapping[str, Any] | PageNotFound:
    """What a page shows of something that all who watch share; `found` is None if it is away."""
    name = asked.query.get("name", "") or parts.first_queue
    whole: dict[str, Any] = {"name": name, "way": way(name, here), "found": None, "cost": None}
    whole |= {"trouble": "", "is_absent": False}
    if parts.queues is None:
        return {**whole, "trouble": NO_STORE}
    try:
        answer = await parts.queues.read(name, (here, what), make, seconds=seconds)
    except (QueueNotFound, TaskNotFound, InvalidInput) as error:
        if isinstance(error, QueueNotFound) and not asked.query.get("name"):
            return {**whole, "is_absent": True}
        return PageNotFound(error.message, error.hint)
    except PenstockError as error:
        return {**whole, "trouble": error.message}
    except TimeoutError:
        why = f"The store timed out after {READ_SECONDS_MAX:.0f} seconds."
        return {**whole, "trouble": why}
    return {**whole, "trouble": answer.trouble, **_took(answer, seconds), **show(answer.found)}


def _took(answer: SharedAnswer[Any], seconds: float) -> dict[str, Any]:
    return {
        "found": answer.found,
        "cost": {
            "at": answer.at,
            "requests": answer.requests,
            "dollars": money(answer.dollars),
            "seconds": seconds,
        },
    }


def value_of(given: Any) -> str:
    """An input or a result as text, not endlessly long."""
    text = json.dumps(given, indent=2, ensure_ascii=False)
    if len(text) <= _VALUE_CHARACTERS_MAX:
        return text
    return f"{text[:_VALUE_CHARACTERS_MAX]}…\n{len(text):,} characters in total."


def money(dollars: float) -> str:
    """An amount with two digits that count, at least to the cent."""
    if dollars == 0 or dollars >= 0.995:
        return f"${dollars:,.2f}"
    places = 2
    while round(dollars, places) < 10.0 ** (1 - places) and places < 12:
        places += 1
    return f"${dollars:.{places}f}"
