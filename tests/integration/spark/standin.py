"""A stand-in for the engine: does what the config says, on the session that it is given.

With it the host is tested before, and apart from, what the operators do. `config["do"]` names a
function below.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkResult
from penstock.runtimes.spark.engine_protocol import RunReporter, WorkFailure, WorkOutcome
from penstock.runtimes.spark.settings import SparkSettings

_LONG = "SELECT sum(a.id % 7) FROM range(1000000000) a CROSS JOIN range(1000000) b"
_never = threading.Event()


class Engine:
    def __init__(self, settings: SparkSettings, session: Any) -> None:
        self.settings = settings

    def run(self, session: Any, works: Sequence[AttemptWork], tell: RunReporter) -> None:
        for task_id, ended in _DOES[works[0].config["do"]](session, works, tell).items():
            tell.end(task_id, ended)


def _done(work: AttemptWork, **metrics: Any) -> WorkResult:
    made = tuple(
        ProducedOutput(output=name, location=at.location) for name, at in work.outputs.items()
    )
    return WorkResult(made=made, metrics=metrics)


def _count(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    tell.phase("running")
    ended: dict[int, WorkOutcome] = {}
    for work in works:
        rows = session.sql(
            f"SELECT id % 3, count(*) FROM range({work.config['rows']}) GROUP BY 1"
        ).collect()
        zone = session.conf.get("spark.sql.session.timeZone")
        ended[work.task_id] = _done(work, rows=sum(row[1] for row in rows), zone=zone)
    return ended


def _long(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """A Spark job without end."""
    _say(works[0], "begun")
    session.sql(_LONG).collect()
    raise AssertionError("it has no end")


def _active(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """How many Spark jobs still run, after some time to end."""
    tracker, jobs = session.sparkContext.statusTracker(), 0
    for _ in range(100):
        jobs = len(tracker.getActiveJobsIds())
        if not jobs:
            break
        _never.wait(0.1)
    return {works[0].task_id: _done(works[0], active=jobs)}


def _stubborn(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """Python that does not let go."""
    _say(works[0], "begun")
    while True:
        try:
            _never.wait()
        except BaseException:  # noqa: BLE001 - that is what stubborn means
            continue


def _looping(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """Python that runs for ever and catches what it can, but can be interrupted."""
    _say(works[0], "begun")
    try:
        while True:
            try:
                session.sql("SELECT 1").collect()
            except Exception:  # noqa: BLE001 - as users' code does
                continue
    finally:
        _say(works[0], "interrupted")


def _print(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """Prints, in turns with others: waits for a file before each line."""
    work = works[0]
    _say(work, "begun")
    for number in range(3):
        _wait_for(Path(work.config["folder"]) / f"go-{number}")
        print(f"line {number} of {work.task_id}")  # noqa: T201 - as users' code does
        logging.getLogger("user").info("logged %s of %s", number, work.task_id)
        _say(work, f"printed-{number}")
    return {work.task_id: _done(work)}


def _batch(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """One job for all; it waits until it may go on, then says who was still wanted."""
    _say(works[0], "begun")
    _wait_for(Path(works[0].config["folder"]) / "go")
    wanted = [work for work in works if not tell.is_dropped(work.task_id)]
    session.sql("SELECT 1").collect()
    return {work.task_id: _done(work, batch=len(works)) for work in wanted}


def _singly(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """Each member by itself; the first has no end, and is cancelled alone."""
    ended: dict[int, WorkOutcome] = {}
    for number, work in enumerate(works):
        tell.begin([work.task_id])
        try:
            if number == 0:
                _say(work, "begun")
                session.sql(_LONG).collect()
            session.sql("SELECT 1").collect()
            ended[work.task_id] = _done(work)
        except Exception as error:  # noqa: BLE001 - one member's failure is its own
            ended[work.task_id] = WorkFailure(reason=str(error))
    return ended


def _udf(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """A Python worker of Spark that holds a pipe, and hangs."""
    pipe = works[0].config["pipe"]

    def hang(rows: Any) -> Any:
        held = os.open(pipe, os.O_WRONLY)
        os.write(held, b"begun\n")
        threading.Event().wait()
        yield from rows

    session.range(1).collect()
    _say(works[0], "warm")
    session.range(1).mapInArrow(hang, "id long").collect()
    raise AssertionError("it has no end")


def _stop_session(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    session.sparkContext._jsc.stop()
    session.sql("SELECT 1").collect()
    return {}


def _exhaust(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """Wants more memory than the JVM has."""
    context = session.sparkContext
    hold = [context._gateway.new_array(context._jvm.long, 2**24) for _ in range(64)]
    raise AssertionError(f"it had room for {len(hold)}")


def _fail(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    raise ValueError("The number is wrong.")


def _bad_udf(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """Fails in an executor, which logs it."""
    try:
        session.sql("SELECT raise_error('bad luck') FROM range(1)").collect()
    except Exception:  # noqa: BLE001 - that it is logged is the point
        return {work.task_id: WorkFailure(reason="bad luck", is_retried=False) for work in works}
    raise AssertionError("it must fail")


def _leave_view(
    session: Any, works: Sequence[AttemptWork], tell: RunReporter
) -> Mapping[int, WorkOutcome]:
    """Says what an earlier task has left in the session, and leaves something itself."""
    seen = len(session.catalog.listTables())
    zone = session.conf.get("spark.sql.session.timeZone")
    session.range(1).createOrReplaceTempView("left_behind")
    session.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    return {works[0].task_id: _done(works[0], seen=seen, zone=zone)}


_DOES: Mapping[
    str, Callable[[Any, Sequence[AttemptWork], RunReporter], Mapping[int, WorkOutcome]]
] = {
    "count": _count,
    "long": _long,
    "active": _active,
    "stubborn": _stubborn,
    "looping": _looping,
    "print": _print,
    "batch": _batch,
    "singly": _singly,
    "udf": _udf,
    "stop session": _stop_session,
    "exhaust": _exhaust,
    "fail": _fail,
    "bad udf": _bad_udf,
    "leave view": _leave_view,
}


def _say(work: AttemptWork, word: str) -> None:
    """Make a file, for a test that waits for it."""
    Path(work.config["folder"], f"{word}-{work.task_id}").touch()


def _wait_for(file: Path) -> None:
    for _ in range(5_400):
        if file.exists():
            return
        _never.wait(0.05)
    raise AssertionError(f"{file} never came")
