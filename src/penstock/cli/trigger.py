"""`penstock trigger JOB`: ingest events of a source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.completion import datasets, jobs
from penstock.cli.dispatcher_call import asked, line, on_a_dispatcher, show_json
from penstock.cli.format import notes
from penstock.kernel.errors import InvalidInput
from penstock.protocol.events import EventResult
from penstock.protocol.steering import TriggerAnswer, TriggersAnswer

_FILE: Final = "@"
_STANDARD_INPUT: Final = "-"
_MANY: Final = {
    "new": "new",
    "duplicate": "duplicate; ignored",
    "audited": "stored, without tasks",
}


@click.command(
    short_help="Ingest an event of a source.",
    epilog="Example: penstock trigger ingest --partition 2026-01-01T00",
)
@click.argument("job", metavar="[JOB]", required=False, shell_complete=jobs)
@click.option(
    "--dataset",
    metavar="NAME",
    shell_complete=datasets,
    help="Instead of JOB: the name of a dataset.",
)
@click.option("--partition", metavar="KEY", help="The partition.")
@click.option("--start", type=int, help="With --partition: start of its range.")
@click.option("--end", type=int, help="With --partition: end of its range (exclusive).")
@click.option(
    "--cursor", type=int, help="Without --partition: the cursor; default is the time in ms."
)
@click.option(
    "--payload",
    metavar="JSON",
    help="A JSON object for the jobs, or @FILE; 64 KiB at most.",
)
@click.option("--event-id", metavar="ID", help="Event id; duplicates are ignored.")
@click.option(
    "--from",
    "file",
    metavar="FILE",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Many events, one per line: a partition key or a JSON object; - is stdin.",
)
@on_a_dispatcher
@click.pass_context
def trigger(
    context: click.Context,
    *,
    job: str | None,
    dataset: str | None,
    partition: str | None,
    start: int | None,
    end: int | None,
    cursor: int | None,
    payload: str | None,
    event_id: str | None,
    file: str | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Ingest events of a source: a new partition, or a cursor that has moved on.

    Every job that depends on it gets a task. The job is the source, and not the one that should
    run. A partition that has a range keeps it, unless --start and --end say another.

    With --from there are many, a thousand in a request, each thousand taken whole or not at all. A
    line that begins with { is an object with any of partition_key, start, end, cursor, payload and
    event_id; any other is the key of a partition. With --event-id the id of each is that and the
    number of its line, so that the same file can be sent again.

    Exit code 0: it was accepted, now or before. 1: it was refused.
    """
    if (job is None) == (dataset is None):
        raise InvalidInput("Name the source by its job or by --dataset, one of the two.")
    if file is not None:
        if any(each is not None for each in (partition, start, end, cursor, payload)):
            raise InvalidInput("With --from, the events are given in the file only.")
        events = _events(file, event_id)
        told, _ = asked(
            url, token, lambda client: client.trigger_many(job, dataset=dataset, events=events)
        )
        _tell_many(told, as_json=as_json)
        return
    said = _payload(payload) if payload is not None else None
    answer, _ = asked(
        url,
        token,
        lambda client: client.trigger(
            job,
            dataset=dataset,
            event_id=event_id,
            cursor=cursor,
            partition_key=partition,
            start=start,
            end=end,
            payload=said,
        ),
    )
    if as_json:
        show_json(answer)
    else:
        for each in answer.results:
            click.echo(_words(each), err=each.outcome == "refused")
    paused = {line(each.paused) for each in answer.results if each.paused}
    notes([f"the source should pause: {why}" for why in sorted(paused)])
    context.exit(1 if any(each.outcome == "refused" for each in answer.results) else 0)


def _events(file: str, event_id: str | None) -> list[dict[str, Any]]:
    """The events of a file, all of them before the first is sent."""
    name = "the standard input" if file == _STANDARD_INPUT else file
    try:
        with click.open_file(file, encoding="utf-8") as opened:
            lines = opened.read().splitlines()
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not text in UTF-8.") from error
    if not lines:
        raise InvalidInput(f"There is no event in {name}.")
    events = []
    for number, text in enumerate(lines, start=1):
        event = _line_event(text.strip(), f"{name}, line {number}")
        if event_id is not None:
            event.setdefault("event_id", f"{event_id}:{number}")
        events.append(event)
    return events


def _line_event(text: str, where: str) -> dict[str, Any]:
    if not text:
        raise InvalidInput(f"{where} is empty.", hint="Each line is one event.")
    if not text.startswith("{"):
        return {"partition_key": text}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON: {error}.") from error
    return dict(found)


def _tell_many(told: list[TriggerAnswer], *, as_json: bool) -> None:
    results = [result for each in told for result in each.results]
    if as_json:
        show_json(TriggersAnswer(events=told))
    else:
        for outcome, times in Counter(each.outcome for each in results).items():
            click.echo(f"{times:,} {'event is' if times == 1 else 'events are'} {_MANY[outcome]}.")
    paused = {line(each.paused) for each in results if each.paused}
    notes([f"the source should pause: {why}" for why in sorted(paused)])


def _payload(given: str) -> dict[str, Any]:
    """The object that JSON, or a file of it, says."""
    text = given
    if given.startswith(_FILE):
        path = Path(given.removeprefix(_FILE))
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise InvalidInput(
                f"--payload: {path} cannot be read: {error.strerror or error}."
            ) from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"--payload: {path} is not text in UTF-8.") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"--payload is not JSON: {error}.",
            hint="Put it in single quotes, as in '{\"id\": 1}', or in a file: --payload @FILE.",
        ) from error
    if not isinstance(found, dict):
        raise InvalidInput("--payload is a JSON object, as in '{\"id\": 1}'.")
    return found


def _words(result: EventResult) -> str:
    why = line(result.why)
    match result.outcome:
        case "new":
            return f"Event {result.seq} is new."
        case "duplicate":
            return f"Event {result.seq} is a duplicate and was ignored."
        case "audited":
            return f"Event {result.seq} is stored and creates no tasks: {why}"
        case "refused":
            return f"penstock: The event was refused: {why}"
    return f"Event {result.seq}: {line(result.outcome)}. {why}".rstrip()
