"""Pausing and resuming everything, over HTTP."""

from __future__ import annotations

from typing import Final

from penstock.dispatcher.api.endpoints import Call, Endpoint
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.pressure import everything
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.steering import EverythingAnswer, PauseAsk


async def pause_everything(parts: Parts, call: Call) -> Answer:
    """Have no job start anything until it is resumed."""
    ask: PauseAsk = call.ask
    return _answer(await everything.pause_everything(parts.database, ask.reason))


async def resume_everything(parts: Parts, _: Call) -> Answer:
    """End all pauses that people have made."""
    found = await everything.resume_everything(parts.database)
    parts.kick()
    return _answer(found)


def _answer(found: everything.Moved) -> EverythingAnswer:
    return EverythingAnswer(
        jobs=found.jobs, paused_by_people=found.by_people, paused_by_pressure=found.by_pressure
    )


ENDPOINTS: Final = (
    Endpoint(
        "POST",
        "/v1/pause",
        "Pause all jobs",
        pause_everything,
        ask=PauseAsk,
        answer=EverythingAnswer,
        may_omit_body=True,
    ),
    Endpoint("POST", "/v1/resume", "Resume all jobs", resume_everything, answer=EverythingAnswer),
)
