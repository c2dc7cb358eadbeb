"""The event endpoints: events of sources, of running tasks, and of people; and the list of sources.

Every event has its own answer. An event that names a dataset by its name is one for each live
generation of it. A task's events are for its own outputs in its own generation, and are kept in
the transaction that has seen that its attempt is the current one; the attempt's token, which
has to be live, says which task and attempt that can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from penstock.dispatcher.api.auth import note_fenced, note_refused, require_attempt, require_grants
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall
from penstock.dispatcher.api.problems import conflict, malformed, refusal_problem, unknown
from penstock.dispatcher.dag.model import SourceKind
from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.events import AcceptedEvent, EventRefusalReason, NewEvent, RefusedEvent
from penstock.dispatcher.router import BATCH_MAX, accept_events
from penstock.dispatcher.tasks.model import Refusal
from penstock.dispatcher.tasks.rows import refusal, storable, task_states
from penstock.dispatcher.views.status import TriggerTarget
from penstock.kernel.entropy import new_id
from penstock.protocol.base import Answer
from penstock.protocol.events import (
    EventAsk,
    EventResult,
    EventsAnswer,
    EventsAsk,
    RefusalsAnswer,
    RefusalsAsk,
    TaskEventsAsk,
)
from penstock.protocol.problem import Problem
from penstock.protocol.steering import (
    TriggerAnswer,
    TriggerAsk,
    TriggerEvent,
    TriggersAnswer,
    TriggersAsk,
)

_WEBHOOK_NAMES: Final = "A webhook names datasets by their names alone."
_NO_PLACE: Final = "An event names a dataset: by its uuid and version, or by its name."


async def events(parts: ApiContext, call: ApiCall) -> Answer:
    """News of sources."""
    ask: EventsAsk = call.ask
    names = {each.dataset for each in ask.events if each.dataset}
    live = await parts.views.live(names, of_webhooks=call.is_webhook)
    placed: list[NewEvent | EventResult] = []
    for each in ask.events:
        if problem := _place_problem(each):
            placed.append(_refused(problem))
        elif each.dataset is None and call.is_webhook:
            placed.append(_refused(_WEBHOOK_NAMES))
        elif each.dataset is None:
            placed.append(_event(each, each.dataset_uuid or "", each.dataset_version or ""))
        elif found := live.get(each.dataset):
            placed += [_event(each, one.dataset, one.generation) for one in found]
        else:
            what = "dataset of a webhook source" if call.is_webhook else "dataset"
            placed.append(_refused(f"There is no {what} {each.dataset!r} that is live."))
    return EventsAnswer(results=await _accepted(parts, placed))


async def task_events(parts: ApiContext, call: ApiCall) -> Answer:
    """News of a running task about its own outputs."""
    ask: TaskEventsAsk = call.ask
    claims = require_attempt(parts, call, task_id=ask.task_id, attempt=ask.attempt)
    foreign: set[str] = set()

    async def work(connection: Connection) -> list[EventResult] | Refusal:
        fence = {
            "task": ask.task_id,
            "attempt": ask.attempt,
            "token": ask.lease_token,
            "grants": claims.grants.digest,
        }
        row = await (await connection.execute(query("hold_attempt"), fence)).fetchone()
        if row is None:
            states = await task_states(connection, [ask.task_id])
            return refusal(ask.task_id, states.get(ask.task_id))
        require_grants(parts, call, claims, has_grants=row["has_grants"])
        held = {"job": row["job_id"], "generation": row["generation"]}
        found = await (await connection.execute(query("outputs_of_job"), held)).fetchall()
        outputs = {each["name"]: each["dataset"] for each in found}
        placed: list[NewEvent | EventResult] = []
        for each in ask.events:
            if each.dataset_uuid is not None or each.dataset_version is not None:
                foreign.add(each.dataset_uuid or "")
                placed.append(_refused("A task names its outputs by `dataset` alone."))
            elif each.dataset not in outputs:
                foreign.add(each.dataset or "")
                placed.append(_refused(f"Dataset {each.dataset!r} is not an output of this task."))
            else:
                event = _event(each, outputs[each.dataset], row["generation"])
                placed.append(replace(event, task_id=ask.task_id))
        new = [each for each in placed if isinstance(each, NewEvent)]
        return _merged(placed, await accept_events(connection, new))

    results = await parts.database.transact(work)
    if isinstance(results, Refusal):
        note_fenced(parts, call, [(results, claims)])
        return refusal_problem(results)
    for name in sorted(foreign):
        said = {"dataset": storable(name)}
        note_refused(parts, call, reason="not an output", claims=claims, detail=said)
    parts.kick()
    return EventsAnswer(results=results)


async def sources(parts: ApiContext, call: ApiCall) -> Answer:
    """The sources of the DAG in force; the process of webhooks is told of its own."""
    found = await parts.views.sources()
    if call.is_webhook:
        found.sources = [each for each in found.sources if each.kind == SourceKind.WEBHOOK]
    found.is_open = parts.api_token is None
    return found


async def webhook_refusals(parts: ApiContext, call: ApiCall) -> Answer:
    """Note in the audit whom a webhook has refused. They have proved nothing, so they are nobody's
    but their address's."""
    ask: RefusalsAsk = call.ask
    for each in ask.refusals:
        parts.audit.note(
            what=f"webhook {storable(each.job)}",
            outcome="refused",
            address=storable(each.address),
            reason=storable(each.reason),
            times=each.times,
        )
    return RefusalsAnswer(noted=len(ask.refusals))


async def trigger(parts: ApiContext, call: ApiCall) -> Answer:
    """News that a person tells of a source."""
    ask: TriggerAsk = call.ask
    told = await _ingest(parts, ask, [ask])
    return told[0] if isinstance(told, list) else told


async def triggers(parts: ApiContext, call: ApiCall) -> Answer:
    """Much news that a program tells of a source."""
    ask: TriggersAsk = call.ask
    told = await _ingest(parts, ask, ask.events)
    return TriggersAnswer(events=told) if isinstance(told, list) else told


async def _ingest(
    parts: ApiContext, ask: TriggerAsk | TriggersAsk, events: Sequence[TriggerEvent]
) -> list[TriggerAnswer] | Problem:
    """All of these of one source, or nothing."""
    if (ask.job is None) == (ask.dataset is None):
        return malformed("A trigger names a job or a dataset, and not both.", field="job")
    targets = await parts.views.targets(job=ask.job, dataset=ask.dataset)
    if not targets:
        name = f"job {ask.job!r}" if ask.job is not None else f"dataset {ask.dataset!r}"
        return unknown(f"The DAG that is in force has no {name}.")
    if not targets[0].is_source:
        title = f"The job {targets[0].job!r} is not a source."
        detail = "Trigger a source upstream of it, or make a backfill of it."
        return conflict("not a source", title, detail=detail)
    places = [each for each in targets if each.dataset is not None and each.generation is not None]
    ids = [each.event_id or f"trigger:{new_id(parts.entropy)}" for each in events]
    new = [
        _triggered(each, event_id, target)
        for each, event_id in zip(events, ids, strict=True)
        for target in places
    ]
    # To whoever triggers it is one event, in however many datasets and generations.
    answers = await parts.routing.accept(new, all_or_none=True, at_once=True)
    for wrong in answers:
        if isinstance(wrong, RefusedEvent):
            field = f"events[{(wrong.place or 0) // len(places)}]" if events != [ask] else ""
            return malformed(_result(wrong).why or "The event is invalid.", field=field)
    _kick(parts, answers)
    results = iter(_merged(new, answers))
    return [
        TriggerAnswer(event_id=event_id, results=list(islice(results, len(places))))
        for event_id in ids
    ]


def _triggered(ask: TriggerEvent, event_id: str, target: TriggerTarget) -> NewEvent:
    is_bare = ask.cursor is None and ask.partition_key is None
    return NewEvent(
        dataset=target.dataset or "",
        generation=target.generation or "",
        event_id=event_id,
        cursor=target.now_ms if is_bare else ask.cursor,
        partition_key=ask.partition_key,
        start=ask.start,
        end=ask.end,
        payload=ask.payload,
    )


def _place_problem(ask: EventAsk) -> str:
    """What is wrong with how an event names its dataset; empty if nothing is."""
    by_uuid = (ask.dataset_uuid is not None, ask.dataset_version is not None)
    is_named = ask.dataset is not None
    return "" if by_uuid == (not is_named, not is_named) else _NO_PLACE


def _event(ask: EventAsk, dataset: str, generation: str) -> NewEvent:
    return NewEvent(
        dataset=dataset,
        generation=generation,
        event_id=ask.event_id,
        cursor=ask.cursor,
        partition_key=ask.partition_key,
        start=ask.start,
        end=ask.end,
        payload=ask.payload,
    )


async def _accepted(
    parts: ApiContext, placed: Sequence[NewEvent | EventResult]
) -> list[EventResult]:
    new = [each for each in placed if isinstance(each, NewEvent)]
    answers: list[AcceptedEvent | RefusedEvent] = []
    # A name that stands for two generations makes two events of one.
    for first in range(0, len(new), BATCH_MAX):
        answers += await parts.routing.accept(new[first : first + BATCH_MAX], at_once=True)
    _kick(parts, answers)
    return _merged(placed, answers)


def _kick(parts: ApiContext, answers: Sequence[AcceptedEvent | RefusedEvent]) -> None:
    """Have the loops begin with what these have brought; what is routed is announced as well."""
    if not all(isinstance(each, AcceptedEvent) and each.is_routed for each in answers):
        parts.kick()


def _merged(
    placed: Iterable[NewEvent | EventResult], answers: Iterable[AcceptedEvent | RefusedEvent]
) -> list[EventResult]:
    """The answers in the places of their events."""
    told = iter(answers)
    return [_result(next(told)) if isinstance(each, NewEvent) else each for each in placed]


def _result(found: AcceptedEvent | RefusedEvent) -> EventResult:
    if isinstance(found, RefusedEvent):
        return _refused(found.detail or _default(found.why))
    return EventResult(
        outcome=found.outcome.value, seq=found.seq, why=found.why_not, paused=found.paused
    )


def _default(why: EventRefusalReason) -> str:
    return f"The event was refused: {why.value}."


def _refused(why: str) -> EventResult:
    return EventResult(outcome="refused", why=why)
