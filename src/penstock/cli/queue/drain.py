"""`penstock queue drain`: take no more tasks, and wait until none is left."""

from __future__ import annotations

import asyncio

import click

from penstock.cli.durations import DURATION, Seconds
from penstock.cli.progress import Bar
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.pause import show_held, type_option
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import notes, plain
from penstock.kernel.errors import InvalidInput
from penstock.queue.control import PRODUCER_SECONDS, Held
from penstock.queue.draining import Left, wait_until_empty


@click.command(
    short_help="Take no more tasks; with --wait, until none is left.",
    epilog="Example: penstock queue drain --wait --store file:///tmp/store",
)
@type_option
@click.option("--wait", "is_waited", is_flag=True, help="Wait until no task is left.")
@click.option("--timeout", metavar=DURATION, type=Seconds(), help="Wait no longer than that.")
@on_a_queue
@click.pass_context
def drain(
    context: click.Context,
    *,
    type: str | None,
    is_waited: bool,
    timeout: float | None,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Refuse submits, of a type or at all, until it is resumed; workers go on.

    Producers hear of it within 30 seconds. With --wait, returns when no task is ready, delayed or
    running, and at least 30 seconds have passed since the drain began.

    Exit code 0: drained, and with --wait empty. 1: tasks were left at the timeout.
    """
    if timeout is not None and not is_waited:
        raise InvalidInput("--timeout says how long to --wait.", hint="Give --wait with it.")
    if timeout is not None and timeout <= 0:
        raise InvalidInput(f"A timeout of {timeout:g} s is over before it begins.")
    held, now, is_empty = asyncio.run(
        _drained(store, name, type, is_waited=is_waited, seconds=timeout)
    )
    if not is_waited:
        show_held(held, now=now, as_json=as_json)
        if not as_json:
            click.echo(f"Producers hear of it within {PRODUCER_SECONDS:.0f} s.")
    elif as_json:
        show_json({"held": plain(list(held)), "is_empty": is_empty})
    else:
        click.echo(
            "Nothing is left."
            if is_empty
            else "Within the timeout there were tasks left, or producers that may not have heard of"
            f" it: they hear within {PRODUCER_SECONDS:.0f} s."
        )
    context.exit(0 if is_empty or not is_waited else 1)


async def _drained(
    store: str | None, name: str, type: str | None, *, is_waited: bool, seconds: float | None
) -> tuple[tuple[Held, ...], float, bool]:
    async with opened(store, name) as queue:
        held = await queue.drain(type)
        now = queue.access.now().middle
        if not is_waited:
            return held, now, False
        paused = [each for each in held if each.paused_at and each.type in (None, type)]
        if paused:
            notes(["It is paused, so what waits does not start: 'penstock queue resume' lifts it."])
        with _Progress() as progress:
            is_empty = await wait_until_empty(queue.access, type, seconds=seconds, tell=progress)
        return held, now, is_empty


class _Progress(Bar):
    """Says how much is left, as a part of the most that there was."""

    _most = 0

    def __call__(self, left: Left) -> None:
        self._most = max(self._most, left.tasks)
        more = "" if left.is_whole else " at least"
        text = f"{left.tasks:,}{more} left"
        if not left.tasks:
            text += "; producers are given the time to hear of it"
        self.show(text, done=self._most - left.tasks, of=self._most)
