"""Spans of submits and attempts for OpenTelemetry.

A submit is a span `submit TYPE` in the producer, and its context is written into the pack, as
in the header `traceparent`. Every attempt is a span `attempt TYPE` in its worker, the root of a
trace of its own, with a link to the submit: an attempt can come days later, and there may be
several. What a handler does is below it.

Nothing here imports OpenTelemetry. A program that collects spans has imported it itself; in any
other the functions do nothing, and cost a dictionary lookup. No requests are made.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from penstock.queue.attempt_outcomes import (
    AttemptCancelled,
    AttemptOutcome,
    Expired,
    Failed,
    GivenBack,
    Rescheduled,
    Retried,
    Succeeded,
)

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NAME: Final = "penstock"
_OUTCOMES: Final[Mapping[type[AttemptOutcome], str]] = {
    Succeeded: "succeeded",
    Failed: "failed",
    Retried: "retried",
    Rescheduled: "rescheduled",
    GivenBack: "givenback",
    AttemptCancelled: "stopped",
    Expired: "expired",
}
"""What spans say, whatever the classes are called."""

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class AttemptSpan:
    """The span of one attempt; of no effect if nobody collects spans."""

    def __init__(self, api: Any = None, span: Any = None) -> None:
        self._api = api
        self._span = span

    @property
    def traceparent(self) -> str:
        """Where what the handler does belongs; empty if nobody collects spans."""
        return "" if self._span is None else _traceparent(self._span.get_span_context())

    def end(self, ending: AttemptOutcome | None) -> None:
        """Say how the attempt ended. None: the task was lost to another."""
        if self._span is None:
            return
        outcome = "lost" if ending is None else _OUTCOMES[type(ending)]
        self._span.set_attribute("penstock.outcome", outcome)
        if isinstance(ending, Failed | Retried):
            said = f"{ending.failure.error}: {ending.failure.message}"
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, said[:500]))


def submitting(
    submit: Callable[Given, Coroutine[Any, Any, Answer]],
) -> Callable[Given, Coroutine[Any, Any, Answer]]:
    """Have a method that submits tasks, and whose first argument is their type, run in a span."""

    @functools.wraps(submit)
    async def in_a_span(*given: Given.args, **named: Given.kwargs) -> Answer:
        api = _api()
        if api is None:
            return await submit(*given, **named)
        tasks = given[1] if len(given) > 1 else named.get("type")
        span = api.get_tracer(_NAME).start_span(
            f"submit {tasks}", kind=api.SpanKind.PRODUCER, attributes={"penstock.type": str(tasks)}
        )
        # What it raises is the caller's business, and is recorded.
        with api.use_span(span, end_on_exit=True):
            return await submit(*given, **named)

    return in_a_span


def is_collected() -> bool:
    """Whether this program uses OpenTelemetry, so that somebody may collect spans."""
    return _api() is not None


def present() -> str:
    """The span that this runs in, as a `traceparent`; empty if there is none."""
    api = _api()
    return "" if api is None else _traceparent(api.get_current_span().get_span_context())


@contextmanager
def attempting(
    *, type: str, trace: str, attributes: Mapping[str, str | int]
) -> Iterator[AttemptSpan]:
    """The span of an attempt, linked to that of its submit; the current one meanwhile."""
    api = _api()
    if api is None:
        yield AttemptSpan()
        return
    submit = _context(api, trace)
    span = api.get_tracer(_NAME).start_span(
        f"attempt {type}",
        context=api.set_span_in_context(api.INVALID_SPAN),
        kind=api.SpanKind.CONSUMER,
        attributes={"penstock.type": type, **attributes},
        links=[api.Link(submit)] if submit is not None else [],
    )
    with api.use_span(
        span, end_on_exit=True, record_exception=False, set_status_on_exception=False
    ):
        yield AttemptSpan(api, span)


@contextmanager
def under(trace: str) -> Iterator[None]:
    """What is done inside belongs to a span of another process."""
    api = _api()
    context = _context(api, trace) if api is not None else None
    if api is None or context is None:
        yield
        return
    with api.use_span(api.NonRecordingSpan(context), end_on_exit=False):
        yield


def _api() -> Any:
    """OpenTelemetry, if this program uses it."""
    return sys.modules.get("opentelemetry.trace")


def _traceparent(context: Any) -> str:
    if not context.is_valid:
        return ""
    flags = int(context.trace_flags) & 0xFF
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


def _context(api: Any, trace: str) -> Any:
    """What a `traceparent` names; None if it names nothing."""
    found = _TRACEPARENT.fullmatch(trace)
    if found is None:
        return None
    trace_id, span_id, flags = (int(each, 16) for each in found.groups())
    context = api.SpanContext(trace_id, span_id, is_remote=True, trace_flags=api.TraceFlags(flags))
    return context if context.is_valid else None
