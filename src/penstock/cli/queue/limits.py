"""`penstock queue limits`: how many tasks of a key run at a time, or start in a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click

from penstock.cli.format import length, print_json
from penstock.cli.options import DURATION, Seconds
from penstock.cli.output import table
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.queue.limits import LimitView

_EXAMPLE = "penstock queue limits set api --concurrency 5 --store file:///tmp/store"


@click.group(
    invoke_without_command=True,
    short_help="Manage concurrency and rate limits per key.",
    epilog=f"Example: {_EXAMPLE}",
)
@click.pass_context
def limits(context: click.Context) -> None:
    """Limits for tasks that are submitted with --limit KEY, in the whole fleet.

    A key without a limit is unlimited.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@limits.command(name="set", short_help="Define or change a limit.", epilog=f"Example: {_EXAMPLE}")
@click.argument("key", metavar="KEY")
@click.option("--concurrency", metavar="N", type=int, help="Maximum concurrency.")
@click.option("--rate", metavar="N", type=float, help="Maximum starts per --per.")
@click.option(
    "--per",
    metavar=DURATION,
    type=Seconds(0.001),
    default=1.0,
    show_default=True,
    help="With --rate: the period.",
)
@click.option("--burst", metavar="N", type=int, help="Maximum burst.  [default: the rate]")
@on_a_queue
def set_(
    *,
    key: str,
    concurrency: int | None,
    rate: float | None,
    per: float,
    burst: int | None,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Define a limit, or change it while it is in use.

    Workers that use it hear of a change within 20 seconds, and of a new limit within 30. What is
    above a lower limit goes on to its end.
    """

    if concurrency is None and rate is None:
        raise InvalidInput(
            "A limit needs a concurrency, a rate, or both.",
            hint="Write --concurrency 5, or --rate 10 --per 60.",
        )

    async def set_it() -> LimitView:
        async with opened(store, name) as queue:
            return await queue.limits.set(
                key, concurrency=concurrency, rate=rate, per_seconds=per, burst=burst
            )

    limit = asyncio.run(set_it())
    if as_json:
        print_json(limit)
    else:
        click.echo(f"{limit.key}: {_words(limit)}")


@limits.command(
    name="list",
    short_help="Show all limits and their usage.",
    epilog="Example: penstock queue limits list --store file:///tmp/store",
)
@on_a_queue
def list_(*, store: str | None, name: str, as_json: bool) -> None:
    """Show all limits and their usage."""

    async def listed() -> Sequence[LimitView]:
        async with opened(store, name) as queue:
            return await queue.limits.list()

    found = asyncio.run(listed())
    if as_json:
        print_json(list(found))
    elif not found:
        click.echo(f"The queue {name!r} has no limits.")
    else:
        rows = [(each.key, _words(each), _taken(each)) for each in found]
        table(("key", "allows", "now"), rows)


@limits.command(
    short_help="Show a limit and its holders.",
    epilog="Example: penstock queue limits show api --store file:///tmp/store",
)
@click.argument("key", metavar="KEY")
@on_a_queue
def show(*, key: str, store: str | None, name: str, as_json: bool) -> None:
    """Show a limit and its holders."""

    async def got() -> tuple[LimitView | None, float]:
        async with opened(store, name) as queue:
            limit = await queue.limits.get(key)
            return limit, queue.access.now().middle

    limit, now = asyncio.run(got())
    if limit is None:
        raise _no_such_limit(key)
    if as_json:
        print_json(limit)
        return
    click.echo(f"{limit.key}: {_words(limit)}; {_taken(limit)}")
    rows = [
        (
            each.worker,
            str(each.permits),
            str(each.waits_for),
            str(each.tokens),
            f"in {length(each.ends_at - now)}",
        )
        for each in limit.holders
    ]
    if rows:
        click.echo()
        heads = ("worker", "permits", "waits for", "starts taken", "expires")
        table(heads, rows, numbers=(1, 2, 3))


@limits.command(
    short_help="Remove the limit of a key.",
    epilog="Example: penstock queue limits remove api --store file:///tmp/store",
)
@click.argument("key", metavar="KEY")
@on_a_queue
def remove(*, key: str, store: str | None, name: str, as_json: bool) -> None:
    """Remove the limit of a key. Workers notice within 20 seconds."""

    async def removed() -> bool:
        async with opened(store, name) as queue:
            return await queue.limits.remove(key)

    if not asyncio.run(removed()):
        raise _no_such_limit(key)
    if as_json:
        print_json({"removed": key})
    else:
        click.echo(f"The tasks of {key!r} run without a limit.")


def _no_such_limit(key: str) -> PenstockError:
    return PenstockError(
        f"There is no limit {key!r}: its tasks run without one.",
        hint="'penstock queue limits list' lists them.",
    )


def _words(limit: LimitView) -> str:
    parts = []
    if limit.concurrency is not None:
        parts.append(f"{limit.concurrency:,} at a time")
    if limit.rate is not None:
        per = "a second" if limit.per_seconds == 1 else f"in {limit.per_seconds:g} s"
        parts.append(f"{limit.rate:g} starts {per}, {limit.burst:,} at once")
    return "; ".join(parts)


def _taken(limit: LimitView) -> str:
    parts = []
    if limit.concurrency is not None:
        waiting = sum(each.waits_for for each in limit.holders)
        more = f", {waiting:,} more wanted" if waiting else ""
        parts.append(f"{limit.permits_held:,} held{more}")
    if limit.rate is not None:
        parts.append(f"{limit.tokens_left:,} may start")
    return "; ".join(parts)
