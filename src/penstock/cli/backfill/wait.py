"""Waiting for a backfill, and the exit code that tells how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from penstock.cli.backfill.showing import Progress
from penstock.cli.calling import timeout_option
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.steering import BackfillAnswer

Verb = TypeVar("Verb", bound=Callable[..., Any])

_wait_option = click.option(
    "--wait", is_flag=True, help="Wait until it is over, and say how far it is."
)


def with_waiting(verb: Verb) -> Verb:
    """Give a verb `wait` and `timeout_seconds`."""
    return _wait_option(timeout_option(verb))


async def waited(client: Client, id: int, *, timeout_seconds: float) -> BackfillAnswer:
    """The backfill when it is over. Its progress goes to standard error."""
    progress = Progress()
    try:
        return await client.wait(backfill=id, timeout_seconds=timeout_seconds, told=progress)
    finally:
        progress.end()


def exit_code(found: BackfillAnswer, *, wait: bool) -> int:
    """1 for a backfill that was waited for and has not computed everything."""
    return 1 if wait and (found.state == "cancelled" or found.dead or found.cancelled) else 0
