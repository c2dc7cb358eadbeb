"""Every verb that waits shows on a terminal how far it is, and says nothing of it in a pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import click
import pytest

from penstock import Queue
from penstock.cli import cli
from penstock.kernel.errors import PenstockError
from penstock.testing.cost import Figures, Workload
from tests.unit.cli.terminal import Hurried, typed
from tests.unit.dispatcher.client.scripted import Scripted, backfill, job, status

_ERASE = "\r\x1b[K"
_AT_A_DISPATCHER = {
    "status --wait": "waiting",
    "backfill start totals --key a --wait": "backfill 7 of totals",
    "backfill show 7 --wait": "backfill 7 of totals",
}
"""What each says while it waits."""
_AT_A_QUEUE = {"queue batch BATCH --wait": "0 of 2 ended", "queue drain --wait": "2 left"}


def _waiting(command: click.Command, words: str = "") -> Iterator[str]:
    """The verbs that can wait."""
    if any("--wait" in each.opts for each in command.params):
        yield words.strip()
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _waiting(found, f"{words} {name}")


def test_every_verb_that_waits_is_looked_at_here() -> None:
    for verb in _waiting(cli):
        assert any(each.startswith(f"{verb} ") for each in (*_AT_A_DISPATCHER, *_AT_A_QUEUE)), verb


def test_what_is_simulated_for_a_price_is_shown_to_who_looks() -> None:
    def price(_load: Workload, *, full: bool, tell: Callable[[str], None]) -> Figures:
        tell("the mode leased with its load")
        tell("the mode leased with nothing to do")
        raise PenstockError(f"No figures, {full}.")

    with mock.patch("penstock.cli.cost.price", price):
        looked = typed("cost", clock=Hurried())
        piped = typed("cost", is_terminal=False, clock=Hurried())
    assert "Simulating the mode leased with its load, 1 of 2;" in looked.errors
    assert "Simulating the mode leased with nothing to do, 2 of 2;" in looked.errors
    assert looked.errors.endswith(f"{_ERASE}penstock: No figures, False.\n")
    assert piped.errors == "penstock: No figures, False.\n"


@pytest.mark.parametrize("line", _AT_A_DISPATCHER)
def test_progress_of_a_dispatcher_is_for_who_looks(line: str) -> None:
    said = {}
    for is_terminal in (True, False):
        dispatcher = Scripted()
        dispatcher.on("GET /v1/status", status(job(queued=3)), status(job(queued=0)))
        dispatcher.on("POST /v1/backfills", backfill(planned=10, open=5))
        done = backfill(planned=1000, open=0, state="done")
        dispatcher.on("GET /v1/backfills/7", backfill(planned=10, open=5), done)
        words = line.split()
        ran = typed(*words, dispatcher=dispatcher, is_terminal=is_terminal, clock=Hurried())
        assert ran.code == 0, ran.errors
        said[is_terminal] = ran.errors
    assert _ERASE in said[True]
    assert _AT_A_DISPATCHER[line] in said[True]
    # It is gone at the end, and was never in what is kept.
    assert said[True].rpartition(_ERASE)[2] == said[False]
    assert _AT_A_DISPATCHER[line] not in said[False]


@pytest.mark.parametrize("line", _AT_A_QUEUE)
def test_progress_of_a_queue_is_for_who_looks(line: str, tmp_path: Path) -> None:
    store = f"file://{tmp_path}"

    async def begin() -> str:
        async with await Queue.open(store, name="default") as queue:
            return (await queue.batch("resize", [1, 2])).id

    words = [*line.replace("BATCH", asyncio.run(begin())).split(), "--store", store]
    text = _AT_A_QUEUE[line]
    ran = typed(*words, "--timeout", "120", until=text, clock=Hurried())
    assert ran.code == 130
    assert text in ran.errors
    assert ran.errors.rpartition(_ERASE)[2].strip() == "penstock: Interrupted."
    piped = typed(*words, "--timeout", "0.2", is_terminal=False, clock=Hurried())
    assert (piped.code, text in piped.errors) == (1, False)


def test_a_batch_that_does_not_end_in_time_is_told_at_a_terminal_too(tmp_path: Path) -> None:
    store = f"file://{tmp_path}"

    async def begin() -> tuple[str, str]:
        async with await Queue.open(store, name="default") as queue:
            return (await queue.batch("resize", [1])).id, (await queue.batch("resize", [])).id

    open_, ended = asyncio.run(begin())
    words = ("queue", "batch", open_, "--store", store)
    ran = typed(*words, "--wait", "--timeout", "0.1", clock=Hurried())
    assert ran.code == 1
    assert f"The batch '{open_}' has not ended in 0.1 s." in ran.errors
    ran = typed("queue", "batch", ended, "--wait", "--store", store, clock=Hurried())
    assert (ran.code, "ended" in ran.out) == (0, True)
