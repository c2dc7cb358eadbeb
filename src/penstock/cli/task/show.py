"""`penstock task show ID`: everything about one task."""

from __future__ import annotations

from collections.abc import Iterator

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import tasks
from penstock.cli.options import absolute_option
from penstock.cli.queue.showing import compact, fields, length
from penstock.cli.task.figures import figures, progress_line
from penstock.cli.telling import ago, fitted, gist, line, lines, show_json
from penstock.dispatcher.wire.steering import AttemptAnswer, ConsumedAnswer, TaskAnswer


@click.command(
    short_help="Show a task, its attempts and outputs.",
    epilog="Example: penstock task show 42",
)
@click.argument("id", metavar="ID", type=click.IntRange(min=1), shell_complete=tasks())
@absolute_option
@on_a_dispatcher
def show(*, id: int, url: str, token: str | None, as_json: bool) -> None:
    """Show where a task is, what it was given, its attempts, what the last of them took, which
    changes of its inputs it has consumed, and what it has published.
    """
    answer, now = asked(url, token, lambda client: client.task(id))
    if as_json:
        show_json(answer)
        return
    fields(_rows(answer, now=now))
    if answer.attempts:
        click.echo()
        heads = ("attempt", "status", "worker", "started", "took", "log", "reason")
        rows = [_attempt(each, now=now) for each in answer.attempts]
        fitted(heads, rows, numbers=(0,))
    for each in [each for each in answer.attempts if each.metrics][:1]:
        click.echo()
        fitted((f"attempt {each.number}", "took"), figures(each.metrics or {}), numbers=(1,))
    if answer.consumed:
        click.echo()
        rows = [_consumed(each) for each in answer.consumed]
        fitted(("changes of", "partitions", "parts", "missed", "consumed"), rows, numbers=(1, 2, 3))
    if answer.published:
        click.echo()
        rows = [
            (each.dataset, line(each.partition_key), each.outcome, str(each.revision or ""))
            for each in answer.published
        ]
        fitted(("published", "partition", "what became of it", "revision"), rows, numbers=(3,))
        if answer.omitted:
            click.echo(f"and {answer.omitted:,} more, which are not named here")


def _rows(answer: TaskAnswer, *, now: float) -> Iterator[tuple[str, str]]:
    task = answer.task
    yield "id", str(task.id)
    yield "job", task.job
    yield "operator", line(task.operator)
    yield "status", task.status
    if task.reason:
        # A traceback has lines, and they are worth having once.
        yield "reason", lines(task.reason)
    yield "attempt", task.attempts
    if task.partition_key is not None:
        yield "partition", line(task.partition_key, characters_max=500)
    if isinstance(about := answer.payload.get("maintain"), dict):
        where = f", partition {about['partition_key']}" if about.get("partition_key") else ""
        yield "rewrites", line(f"{about.get('dataset')}{where}", characters_max=500)
    yield "priority", task.priority
    yield "generation", task.generation
    if task.worker:
        yield "worker", line(task.worker)
    yield "made", ago(task.created_at, now=now)
    if task.settled_at is not None:
        yield "ended", ago(task.settled_at, now=now)
    elif task.status != "running":
        yield "due", ago(task.due_at, now=now)
    running = [each.progress for each in answer.attempts if each.ended_at is None and each.progress]
    for said in running:
        yield "progress", progress_line(said)
    yield "payload", compact(answer.payload)


def _consumed(each: ConsumedAnswer) -> tuple[str, ...]:
    said = (
        f"by attempt {each.attempt}" if each.is_consumed else f"no, read by attempt {each.attempt}"
    )
    return (each.input, str(each.partitions), str(each.parts), str(each.missed), said)


def _attempt(attempt: AttemptAnswer, *, now: float) -> tuple[str, ...]:
    ends = now if attempt.ended_at is None else attempt.ended_at.timestamp()
    return (
        str(attempt.number),
        attempt.outcome or "running",
        line(attempt.worker),
        ago(attempt.started_at, now=now),
        length(ends - attempt.started_at.timestamp()),
        line(attempt.log),
        gist(attempt.reason),
    )
