"""How backfills look, and what is said while one is waited for."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.cli.progress import Bar
from penstock.cli.queue.showing import fields
from penstock.cli.telling import ago, fitted
from penstock.dispatcher.wire.steering import BackfillAnswer


def show_backfills(backfills: Iterable[BackfillAnswer], *, now: float) -> None:
    """A table of backfills."""
    rows = [
        (
            str(each.id),
            each.state,
            each.job,
            each.kind,
            _share(each),
            percent(each),
            f"{each.open:,}",
            f"{each.dead:,}",
            ago(each.created_at, now=now),
        )
        for each in backfills
    ]
    heads = ("backfill", "status", "job", "kind", "ended", "", "open", "dead", "started")
    fitted(heads, rows, numbers=(0, 4, 5, 6, 7), least=(3, 8))


def show_backfill(found: BackfillAnswer, *, now: float) -> None:
    """One backfill."""
    fields(
        [
            ("backfill", str(found.id)),
            ("job", found.job),
            ("kind", found.kind),
            ("status", found.state),
            ("partitions", f"{found.partitions:,}"),
            ("planned", f"{found.planned:,} have become tasks"),
            ("open", f"{found.open:,}, at most {found.concurrency:,} at a time"),
            ("ended", _ended(found)),
            ("started", ago(found.created_at, now=now)),
        ]
    )


def ended(found: BackfillAnswer) -> int:
    """How many partitions have a task that has ended, well or not."""
    return max(0, found.planned - found.open)


def _share(found: BackfillAnswer) -> str:
    if found.partitions:
        return f"{ended(found):,} of {found.partitions:,}"
    return "counting" if found.state == "running" else "nothing to do"


def _ended(found: BackfillAnswer) -> str:
    share = f" ({percent(found)})" if percent(found) else ""
    verb = "is" if found.dead == 1 else "are"
    dead = f"{ended(found):,}{share}, of which {found.dead:,} {verb} dead"
    if not found.cancelled:
        return dead
    return f"{dead} and {found.cancelled:,} {'was' if found.cancelled == 1 else 'were'} cancelled"


def percent(found: BackfillAnswer) -> str:
    if not found.partitions:
        # A rebuild counts as it goes: before that there is nothing to have a part of.
        return ""
    # Not rounded: what is not over is not at 100%.
    return f"{100 * ended(found) // found.partitions}%"


class Progress:
    """Says how far a backfill is, on a terminal, until it is over."""

    def __init__(self) -> None:
        self._bar = Bar()

    def __call__(self, found: BackfillAnswer) -> None:
        text = (
            f"backfill {found.id} of {found.job}: {percent(found) or _share(found)},"
            f" {ended(found):,} of {found.partitions:,} ended, {found.open:,} open,"
            f" {found.dead:,} dead"
        )
        text += f", {found.cancelled:,} cancelled" if found.cancelled else ""
        text += "" if found.state in ("running", "done") else f" ({found.state})"
        self._bar.show(text, done=ended(found), of=found.partitions)

    def end(self) -> None:
        """Leave the line, so that what is said next has its own."""
        self._bar.end()
