"""The verbs that talk to a dispatcher: what they send, what they say, and their exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from penstock import Client
from penstock.cli import dispatcher_call, run
from penstock.protocol.base import Answer
from penstock.protocol.dags import (
    AppliedAnswer,
    BreakAnswer,
    CutOverAnswer,
    DagAnswer,
    DagProblem,
    VersionAnswer,
    VersionsAnswer,
)
from penstock.protocol.datasets import HotTableAnswer
from penstock.protocol.events import EventResult
from penstock.protocol.steering import (
    AttemptAnswer,
    BackfillsAnswer,
    ConsumedAnswer,
    DatasetAnswer,
    DatasetsAnswer,
    EverythingAnswer,
    GenerationAnswer,
    JobPausesAnswer,
    OperatorLimitAnswer,
    OperatorLoad,
    OperatorsAnswer,
    OutboxAnswer,
    OutboxRetryAnswer,
    OutboxRow,
    PartitionAnswer,
    PartitionsAnswer,
    PauseAnswer,
    PressureAnswer,
    PressuresAnswer,
    TaskAnswer,
    TasksAnswer,
    TriggerAnswer,
    TriggersAnswer,
)
from penstock.protocol.work import PublishedAnswer, ResultsAnswer, TaskResult, TaskStateAnswer
from tests.unit.cli.terminal import Hurried
from tests.unit.dispatcher.client.scripted import (
    NOW,
    Reply,
    Scripted,
    Step,
    backfill,
    job,
    problem,
    status,
    summary,
)

DATE = {"Date": "Tue, 01 Jan 2030 00:00:00 GMT"}
AN_HOUR_AGO = NOW - timedelta(minutes=65)
VERBS = (
    "dag apply",
    "dag list",
    "dag rollback",
    "trigger",
    "status",
    "pressure",
    "pause",
    "resume",
    "backfill start",
    "backfill list",
    "backfill show",
    "backfill pause",
    "backfill resume",
    "backfill cancel",
    "task list",
    "task show",
    "task logs",
    "task cancel",
    "task replay",
    "dataset list",
    "dataset show",
    "dataset partitions",
    "dataset files",
    "dataset preview",
    "dataset verify",
    "dataset sweep",
    "dataset maintain",
    "dataset refresh",
    "dataset rebuild-table",
    "dataset cut-over",
    "operator list",
    "operator limit",
    "outbox list",
    "outbox retry",
    "keys list",
    "keys rotate",
    "audit",
)


@dataclass
class User:
    """Somebody at a prompt, and the dispatcher that answers."""

    dispatcher: Scripted = field(default_factory=Scripted)
    opened: list[tuple[str, str | None]] = field(default_factory=list)

    def on(self, request: str, *steps: Step) -> User:
        """Answers as at the first second of 2030."""
        dated = [
            Reply(msgspec.json.encode(each), 200, DATE) if isinstance(each, Answer) else each
            for each in steps
        ]
        self.dispatcher.on(request, *dated)
        return self

    def types(
        self, line: str, *more: str, environment: dict[str, str] | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line in this process."""

        def connected(url: str, token: str | None) -> Client:
            self.opened.append((url, token))
            return Client(url, token, transport=self.dispatcher.transport, clock=Hurried())

        words = [*line.split(), *more]
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        out, errors = io.StringIO(), io.StringIO()
        kept = {n: v for n, v in os.environ.items() if not n.startswith("PENSTOCK_")}
        try:
            with (
                mock.patch.dict(os.environ, {**kept, **(environment or {})}, clear=True),
                mock.patch.object(dispatcher_call, "connected", connected),
                mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
                redirect_stdout(out),
                redirect_stderr(errors),
            ):
                code = run(words)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())

    def said(self, line: str, *more: str, code: int = 0) -> str:
        ran = self.types(line, *more)
        assert ran.returncode == code, ran.stderr
        return ran.stdout

    def json(self, line: str, *more: str, code: int = 0) -> Any:
        return json.loads(self.said(line, *more, "--json", code=code))

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.dispatcher.heard]


@pytest.fixture
def user() -> User:
    return User()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_json(verb: str, user: User) -> None:
    said = user.said(verb, "--help")
    assert f"Example: penstock {verb}" in said
    for option in ("--json", "--url", "PENSTOCK_URL", "--token", "PENSTOCK_API_TOKEN"):
        assert option in said


@pytest.mark.parametrize("group", ["", "dag", "backfill", "task", "dataset", "outbox", "keys"])
def test_alone_a_group_shows_its_verbs_in_whole_words(group: str, user: User) -> None:
    said = user.said(group).partition("Commands:")[2]
    for verb in VERBS:
        first, _, second = verb.partition(" ")
        if first == group:
            assert f"  {second} " in said
    if group:
        assert "..." not in said


ARGUMENTS = {
    "dag rollback": "3",
    "trigger": "ingest",
    "pause": "clean",
    "resume": "clean",
    "backfill start": "totals --key a",
    "backfill show": "7",
    "backfill pause": "7",
    "backfill resume": "7",
    "backfill cancel": "7",
    "task show": "42",
    "task logs": "42",
    "task cancel": "42",
    "task replay": "42",
    "dataset show": "sales",
    "dataset partitions": "sales",
    "dataset files": "sales",
    "dataset preview": "sales",
    "dataset verify": "sales",
    "dataset maintain": "sales",
    "dataset refresh": "sales",
    "dataset rebuild-table": "sales",
    "dataset cut-over": "sales",
    "operator limit": "m:f 3",
    "outbox retry": "1",
}


@pytest.mark.parametrize("verb", [each for each in VERBS if each != "dag apply"])
def test_where_no_dispatcher_answers_every_verb_says_what_to_do(verb: str, user: User) -> None:
    user.dispatcher.steps = {}
    with mock.patch.object(Scripted, "__call__", side_effect=httpx.ConnectError("refused")):
        ran = user.types(f"{verb} {ARGUMENTS.get(verb, '')}")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.splitlines()[:2] == [
        "penstock: No dispatcher answers at http://127.0.0.1:7070.",
        "  Start one with 'penstock up', or say where it is: --url or PENSTOCK_URL.",
    ]


def test_the_dispatcher_is_named_by_options_or_by_the_environment(user: User) -> None:
    user.on("GET /v1/status", status())
    user.types("status")
    user.types("status --url http://a --token b")
    set_ = {"PENSTOCK_URL": "http://c", "PENSTOCK_API_TOKEN": "d"}
    user.types("status", environment=set_)
    user.types("status", environment={"PENSTOCK_URL": "", "PENSTOCK_API_TOKEN": ""})
    assert user.opened == [
        ("http://127.0.0.1:7070", None),
        ("http://a", "b"),
        ("http://c", "d"),
        ("http://127.0.0.1:7070", None),
    ]


def test_a_token_that_is_missing_is_a_failure_with_the_next_step(user: User) -> None:
    user.on("GET /v1/status", problem(401, title="This needs a token."))
    ran = user.types("status")
    assert ran.returncode == 1
    assert "penstock: This needs a token.\n  Give the API token: --token" in ran.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trigger", "Name the source by its job or by --dataset"),
        ("trigger ingest --dataset hours", "Name the source by its job or by --dataset"),
        ("trigger ingest --start x", "'x' is not a valid integer"),
        ("trigger ingest --payload {", "--payload is not JSON"),
        ("trigger ingest --payload [1]", "--payload is a JSON object"),
        ("trigger ingest --payload @missing", "missing cannot be read: No such file"),
        ("backfill start totals", "Which partitions?"),
        ("backfill start totals --key a --start 1", "Which partitions?"),
        ("backfill start totals --start 1 --end 2", "A range needs all three"),
        ("backfill start totals --key a --concurrency 0", "'--concurrency'"),
        ("backfill start totals --keys-file -", "There is no key in the file."),
        ("backfill start totals --keys-file missing", "No such file"),
        ("backfill show x", "'x' is not a valid integer"),
        ("backfill show 0", "0 is not in the range"),
        ("task list --status done", "'done' is not one of 'queued'"),
        ("task list --limit 0", "'--limit'"),
        ("task cancel", "Give the numbers of tasks, or --job"),
        ("task cancel 1 --job clean", "Give the numbers of tasks, or --job"),
        ("task replay 1 --partition p", "are about the tasks of --job"),
        ("task replay --job clean --status queued", "'queued' is not 'dead'"),
        ("task logs 1 --follow --json", "give one of them"),
        ("task cancel 1 x", "'x' is not a valid integer"),
        ("task show -- -1", "-1 is not in the range"),
        ("pause a/b", "'a/b' is not the name of a job."),
        ("pause", "Name one job, or give --all."),
        ("pause clean --all", "Name one job, or give --all."),
        ("resume", "Name one job, or give --all."),
        ("dataset partitions a/b", "'a/b' is not the name of a dataset."),
        ("dag apply missing.yaml", "There is no file 'missing.yaml'."),
        ("status --url ftp://x", "'ftp://x' is not the URL of a dispatcher."),
    ],
)
def test_words_that_cannot_be_right_are_one_sentence_and_no_request(
    line: str, said: str, user: User
) -> None:
    ran = user.types(line)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert ran.stdout == ""
    assert user.dispatcher.heard == []


@pytest.mark.parametrize(("code", "exit_code"), [(400, 2), (413, 2), (422, 2), (404, 1), (409, 1)])
def test_what_the_dispatcher_finds_wrong_with_the_words_is_the_users(
    code: int, exit_code: int, user: User
) -> None:
    user.on("POST /v1/backfills", problem(code, title="Not so.", detail="But so."))
    ran = user.types("backfill start totals --key a")
    assert ran.returncode == exit_code
    assert ran.stderr == "penstock: Not so.\n  But so.\n"


@pytest.mark.parametrize(
    ("words", "path", "title", "hint"),
    [
        (
            "trigger ingset",
            "trigger",
            "The DAG has no job 'ingset'.",
            "Did you mean 'ingest'? 'penst",
        ),
        (
            "pause ingset",
            "jobs/ingset/pause",
            "There is no job 'ingset'.",
            "Did you mean 'ingest'? ",
        ),
        ("pause xyz", "jobs/xyz/pause", "There is no job 'xyz'.", "'penstock status' lists them"),
    ],
)
def test_a_job_that_is_not_there_may_be_one_that_is(
    words: str, path: str, title: str, hint: str, user: User
) -> None:
    user.on(f"POST /v1/{path}", problem(404, title=title))
    user.on("GET /v1/status", status(job("clean"), job("ingest")))
    ran = user.types(words)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"penstock: {title}\n  {hint}")
    # Who cannot be asked says nothing more.
    user.on("GET /v1/status", problem(503, title="Later."))
    assert user.types(words).stderr.startswith(f"penstock: {title}\n  'penstock status' lists")


# The DAG ----------------------------------------------------------------------------------------


def _applied(**fields: Any) -> AppliedAnswer:
    usual = {"version": 3, "hash": "a" * 64, "is_changed": True, "building": [], "cancelled": 0}
    return msgspec.convert({**usual, **fields}, AppliedAnswer)


def test_apply_says_what_becomes_of_it(user: User, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("jobs: {}")
    user.on("POST /v1/dag", _applied(building=["totals", "report"], cancelled=1), _applied())
    assert user.said("dag apply", str(file)) == (
        "Version 3 is in force (aaaaaaaaaaaa).\n"
        "Rebuilt, and readers see the current data until then: totals, report.\n"
        "Cancelled: 1 task that became obsolete.\n"
    )
    assert user.json("dag apply", str(file), "--force")["version"] == 3
    assert user.bodies == [
        {"source": "jobs: {}", "where": str(file)},
        {"source": "jobs: {}", "where": str(file), "force": True},
    ]
    user.on("POST /v1/dag", _applied(is_changed=False))
    assert "is identical and already in force" in user.said("dag apply", str(file))


def test_a_dag_with_problems_is_told_as_the_other_verbs_tell_it(user: User, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("jobs: {}")
    wrong = [DagProblem(line=9, field="jobs.x", message="No.")]
    user.on("POST /v1/dag", problem(422, problems=wrong))
    ran = user.types("dag apply", str(file))
    assert ran.returncode == 2
    assert ran.stderr == f"penstock: {file} has a problem:\n  {file}:9: jobs.x: No.\n"


def test_a_dag_that_breaks_work_is_a_failure_with_the_list(user: User, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("jobs: {}")
    broken = BreakAnswer(job="clean", generation="g", waiting=2, running=1, backfills=0)
    user.on("POST /v1/dag", problem(409, title="It breaks work:", breaks=[broken]))
    ran = user.types("dag apply", str(file))
    assert ran.returncode == 1
    assert ran.stderr == (
        "penstock: It breaks work:\n"
        "  clean: 2 waiting, 1 running, 0 backfills\n"
        "  Wait for them to end, or cancel them with --force.\n"
    )


def test_versions_are_listed_and_rolled_back(user: User) -> None:
    versions = [
        VersionAnswer(id=2, hash="b" * 64, created_at=NOW, is_current=False, since=NOW),
        VersionAnswer(id=1, hash="a" * 64, created_at=AN_HOUR_AGO, is_current=True, since=NOW),
    ]
    user.on("GET /v1/dag/versions", VersionsAnswer(versions=versions), VersionsAnswer(versions=[]))
    assert user.said("dag list").splitlines() == [
        "version  state     since    first applied  hash",
        "      2            0 s ago  0 s ago        bbbbbbbbbbbb",
        "      1  in force  0 s ago  65 min ago     aaaaaaaaaaaa",
    ]
    ran = user.types("dag list")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "penstock dag apply FILE" in ran.stderr
    user.on("POST /v1/dag/rollback", _applied(version=1))
    assert "Version 1 is in force" in user.said("dag rollback 1")
    user.said("dag rollback")
    user.said("dag rollback --dry-run")
    assert user.bodies[-3:] == [{"version": 1}, {}, {"dry_run": True}]


CHANGES = {
    "added": ["extra"],
    "removed": ["mail", "old"],
    "changed": {
        "clean": {"fields": ["config", "inputs"], "keeps_generation": False},
        "sink": {"fields": ["config"], "keeps_generation": False},
        "tick": {"fields": ["timeout"], "keeps_generation": True},
    },
    "rebuilt": ["totals"],
}


def test_apply_says_what_cannot_be_built_and_what_comes_back(user: User, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("jobs: {}")
    losses = [{"dataset": "entries", "job": "log", "publications": 21, "lost": 18}]
    back = {"building": ["log", "sums"], "resumed": ["log"], "returned": ["report"]}
    user.on("POST /v1/dag", _applied(losses=losses, is_dry_run=True, **back))
    said = user.said("dag apply --dry-run", str(file))
    assert "Rebuilt, and readers see the current data until then: sums.\n" in said
    assert "Restored from their earlier output: report.\n" in said
    assert "once it is up to date: log.\n" in said
    assert "Cannot be built anew: 18 of 21 publications of entries" in said
    assert "'penstock dataset cut-over entries --keep'" in said


def test_apply_and_rollback_say_what_becomes_of_each_job(user: User, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("jobs: {}")
    answer = _applied(building=["clean", "totals"], changes=CHANGES)
    user.on("POST /v1/dag", answer).on("POST /v1/dag/rollback", answer)
    said = (
        "Version 3 is in force (aaaaaaaaaaaa).\n"
        "Added: extra.\n"
        "Changed: clean (config, inputs; rebuilt), sink (config), tick (timeout; keeps its data)"
        ".\n"
        "Removed: mail, old; their data stays.\n"
        "Rebuilt, and readers see the current data until then: clean, totals.\n"
    )
    assert user.said("dag apply", str(file)) == said
    assert user.said("dag rollback") == said
    assert user.json("dag apply", str(file))["changes"] == CHANGES


def test_a_dry_run_says_what_would_happen_and_what_it_would_break(
    user: User, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("jobs: {}")
    broken = {"job": "clean", "generation": "g", "waiting": 2, "running": 0, "backfills": 1}
    answer = _applied(version=None, is_dry_run=True, breaks=[broken])
    user.on("POST /v1/dag", answer)
    assert user.said("dag apply --dry-run", str(file), code=1) == (
        "Dry run: this would put a new version in force (aaaaaaaaaaaa).\n"
        "It would make waiting or running work obsolete, and needs --force:\n"
        "  clean: 2 waiting, 0 running, 1 backfill\n"
    )
    assert user.bodies == [{"source": "jobs: {}", "where": str(file), "dry_run": True}]
    assert user.json("dag apply --dry-run --force", str(file))["breaks"] == [broken]
    harmless = _applied(version=2, is_dry_run=True)
    user.dispatcher = Scripted()
    user.on("POST /v1/dag", harmless)
    assert "this would put version 2 in force" in user.said("dag apply --dry-run", str(file))


def test_one_file_is_compared_with_what_is_in_force(user: User, tmp_path: Path) -> None:
    small = (
        "jobs:\n  tick:\n    activation: source\n    source: {kind: manual}\n    outputs: [ticks]\n"
    )
    file = tmp_path / "mine.yaml"
    file.write_text(small)
    version = VersionAnswer(id=2, hash="b" * 64, created_at=NOW, is_current=True)
    in_force = small.replace("  tick:", "  tock:")
    user.on(
        "GET /v1/dag",
        DagAnswer(version=version, source=small, since=NOW),
        DagAnswer(version=version, source=in_force, since=NOW),
        problem(404, title="No DAG is in force."),
        Reply(b"", 500),
    )
    assert user.said("dag diff", str(file)).endswith("The file is identical to the DAG in force.\n")
    assert user.json("dag diff", str(file), code=1)["removed"] == ["tock"]
    assert user.json("dag diff", str(file), code=1)["added"] == ["tick"]
    assert user.types("dag diff", str(file)).returncode == 2
    assert len(user.bodies) == 4
    assert "The files are identical." in user.said("dag diff", str(file), str(file))
    assert len(user.bodies) == 4
    three = user.types("dag diff", str(file), str(file), str(file))
    assert (three.returncode, "not 3" in three.stderr) == (2, True)


# Events, jobs, everything -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "code", "out", "errors"),
    [
        (EventResult(outcome="new", seq=17), 0, "Event 17 is new.\n", ""),
        (EventResult(outcome="duplicate", seq=17), 0, "is a duplicate", ""),
        (EventResult(outcome="audited", seq=17, why="Old."), 0, "creates no tasks: Old.", ""),
        (
            EventResult(outcome="refused", why="No."),
            1,
            "",
            "penstock: The event was refused: No.\n",
        ),
        (
            EventResult(outcome="new", seq=17, paused="Full."),
            0,
            "Event 17 is new.",
            "note: the source should pause: Full.\n",
        ),
    ],
)
def test_trigger_says_what_became_of_the_event(
    result: EventResult, code: int, out: str, errors: str, user: User
) -> None:
    user.on("POST /v1/trigger", TriggerAnswer(event_id="e", results=[result]))
    ran = user.types("trigger ingest --partition p --start 1 --end 2 --event-id e")
    assert ran.returncode == code
    assert out in ran.stdout
    assert ran.stderr == errors
    assert user.bodies == [
        {"job": "ingest", "event_id": "e", "partition_key": "p", "start": 1, "end": 2}
    ]
    assert user.json("trigger --dataset hours", code=code)["event_id"] == "e"


def test_trigger_has_a_payload_of_its_words_or_of_a_file(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = EventResult(outcome="new", seq=1)
    user.on("POST /v1/trigger", TriggerAnswer(event_id="e", results=[result]))
    (tmp_path / "news.json").write_text('{"id": [1, null]}')
    for given in ('{"id":[1,null]}', "@news.json"):
        assert user.types(f"trigger ingest --event-id e --payload {given}").returncode == 0
    (tmp_path / "large.json").write_text(json.dumps({"a": "x" * 70_000}))
    ran = user.types("trigger ingest --payload @large.json")
    assert (ran.returncode, "has 65,536 bytes at most" in ran.stderr) == (2, True)
    assert user.bodies == [{"job": "ingest", "event_id": "e", "payload": {"id": [1, None]}}] * 2


def test_trigger_takes_many_events_of_a_file(user: User, tmp_path: Path) -> None:
    new, known = (EventResult(outcome=each, seq=1) for each in ("new", "duplicate"))
    first = TriggersAnswer(events=[TriggerAnswer(event_id="e", results=[new])] * 1000)
    second = TriggersAnswer(events=[TriggerAnswer(event_id="e", results=[known])] * 2)
    user.on("POST /v1/triggers", first, second)
    lines = [*(f"p{number}" for number in range(1001)), '{"cursor": 7, "event_id": "mine"}']
    ran = user.types("trigger ingest --event-id e --from -", stdin="\n".join(lines) + "\n")
    assert ran.stdout.splitlines() == [
        "1,000 events are new.",
        "2 events are duplicate; ignored.",
    ]
    bodies = user.bodies
    assert [len(each["events"]) for each in bodies] == [1000, 2]
    assert bodies[0]["events"][1] == {"partition_key": "p1", "event_id": "e:2"}
    assert bodies[1]["events"][1] == {"cursor": 7, "event_id": "mine"}
    wrong = tmp_path / "news"
    for text, said in (
        ("p\n\nq\n", "news, line 2 is empty."),
        ('p\n{"a"', "news, line 2 is not JSON"),
        ('p\n{"a": 1}', "Event 2 cannot be read: Object contains unknown field `a`"),
        ("", "There is no event in"),
    ):
        wrong.write_text(text)
        ran = user.types("trigger ingest --from", str(wrong))
        assert (ran.returncode, said in ran.stderr) == (2, True), ran.stderr
    assert user.types(f"trigger ingest --partition p --from {wrong}").returncode == 2
    assert len(user.bodies) == 2


def test_trigger_names_the_event_that_is_refused_and_what_was_taken(user: User) -> None:
    taken = TriggersAnswer(events=[TriggerAnswer(event_id="e", results=[])] * 1000)
    user.on("POST /v1/triggers", taken, problem(422, title="No.", field="events[1]"))
    lines = "\n".join(f"p{number}" for number in range(1003))
    ran = user.types("trigger ingest --from -", stdin=lines)
    assert ran.returncode == 2
    assert "Event 1,002: No. The 1,000 events before that were sent first are taken." in ran.stderr


def test_status_is_one_page(user: User) -> None:
    jobs = [
        job("ingest", activation="source", operator=""),
        job(queued=12_000, running=3, oldest_seconds=90.0, paused=["Full.\x1b[2J"]),
        job("totals", is_building=True, dead=2),
    ]
    page = status(*jobs, workers=0, outbox_parked=1, backfills=[backfill(planned=500, open=20)])
    user.on("GET /v1/status", page)
    ran = user.types("status")
    assert ran.returncode == 0
    assert ran.stdout.splitlines() == [
        "DAG version 1, 3 jobs.",
        "0 workers, 0 events to route, 0 messages to send.",
        "",
        "job     runs         waiting  running  dead  oldest  remarks",
        "ingest  source             0        0     0",
        "clean   mine:clean    12,000        3     0  1 min   paused: Full. [2J",
        "totals  mine:totals        0        0     2          being built",
        "",
        "backfill  status   job     kind           ended       open  dead  started",
        "       7  running  totals  ranges  480 of 1,000  48%    20     0  0 s ago",
    ]
    assert "start one with 'penstock worker'" in ran.stderr
    assert "'penstock task list --status dead'" in ran.stderr
    assert "'penstock outbox list'" in ran.stderr
    assert user.json("status")["now"] == "2030-01-01T00:00:00Z"


def test_status_says_which_table_is_behind(user: User) -> None:
    def table(**fields: object) -> HotTableAnswer:
        given = {"partitions": 9, "behind": 2, "behind_seconds": 5.0, "events": 3, **fields}
        return msgspec.convert(
            {"dataset": "alerts", "is_served": True, "problem": None, **given}, HotTableAnswer
        )

    user.on("GET /v1/status", replace(status(), tables=[table()]))
    assert "alerts" not in user.types("status").stderr
    user.on("GET /v1/status", replace(status(), tables=[table(behind_seconds=90.0)]))
    said = "the table of alerts is behind; 3 events wait for it: 2 partitions wait to be loaded."
    assert said in user.types("status").stderr
    why = "Postgres data does not answer: gone"
    user.on("GET /v1/status", replace(status(), tables=[table(problem=why, events=0)]))
    assert f"the table of alerts is behind: {why}" in user.types("status").stderr


def test_status_says_why_tasks_wait_that_nobody_runs(user: User) -> None:
    waits = {"queued": 1, "oldest_seconds": 90.0}
    jobs = [
        job("typo", **waits, handed_back="There is no module typo.\n  at line 3"),
        job("train", **waits, operator="mine:train@gpu", is_unserved=True),
        job("new", queued=1, oldest_seconds=1.0, is_unserved=True),
        job("idle", is_unserved=True),
    ]
    user.on("GET /v1/status", status(*jobs, workers=1))
    remarks = [each.partition("1 min")[2].strip() for each in user.said("status").splitlines()[4:]]
    assert remarks == [
        "handed back: There is no module typo.",
        "no worker takes tasks of mine:train@gpu",
        "",
        "",
    ]


def test_status_without_a_dag_says_how_to_get_one(user: User) -> None:
    user.on("GET /v1/status", status(dag_version=None))
    assert user.said("status").startswith("No DAG is in force; run 'penstock dag apply FILE'")


def test_status_waits_until_nothing_is_left(user: User) -> None:
    user.on("GET /v1/status", status(job(queued=1)), status(job(dead=1)))
    assert "clean" in user.said("status --wait")
    assert len(user.dispatcher.heard) == 3
    user.on("GET /v1/status", status(job(queued=1)))
    ran = user.types("status --wait --timeout 60")
    assert ran.returncode == 1
    assert "There is still work: clean (1 waiting, 0 running)." in ran.stderr


def test_pressure_shows_queues_and_pauses(user: User) -> None:
    pressed = PressureAnswer(
        job="clean",
        pressed=True,
        depth=12_000,
        oldest_seconds=61.0,
        max_queue_depth=10_000,
        max_queue_age_seconds=None,
        reason="12,000 tasks wait.",
        since=AN_HOUR_AGO,
        pauses=["ingest"],
        held=340,
    )
    paused = PauseAnswer(
        job="ingest", cause="pressure:clean", scope="all", reason="Full.", since=AN_HOUR_AGO
    )
    user.on("GET /v1/pressure", PressuresAnswer(jobs=[pressed], pauses=[paused]))
    assert user.said("pressure").splitlines() == [
        "job    state               depth  held  oldest  since       pauses  reason",
        "clean  pressed  12,000 of 10,000   340   1 min  65 min ago  ingest  12,000 tasks wait.",
        "",
        "paused  what        because of      since       reason",
        "ingest  everything  pressure:clean  65 min ago  Full.",
    ]
    user.on("GET /v1/pressure", PressuresAnswer(jobs=[], pauses=[]))
    assert "Nothing is paused." in user.said("pressure")


def test_a_job_is_paused_and_resumed(user: User) -> None:
    mine = PauseAnswer(job="clean", cause="operator", scope="all", reason="Moving.", since=NOW)
    user.on("POST /v1/jobs/clean/pause", JobPausesAnswer(job="clean", pauses=[mine]))
    user.on("POST /v1/jobs/clean/resume", JobPausesAnswer(job="clean", pauses=[]))
    assert user.said("pause clean", "--reason", "Moving.") == "clean is paused: Moving.\n"
    assert user.said("resume clean") == "clean is resumed: nothing pauses it.\n"
    assert user.bodies == [{"reason": "Moving."}, None]
    assert user.json("pause clean")["pauses"][0]["cause"] == "operator"


def test_everything_is_paused_and_resumed(user: User) -> None:
    many = [f"job-{number}" for number in range(12)]
    paused = EverythingAnswer(jobs=many, paused_by_people=13, paused_by_pressure=1)
    user.on("POST /v1/pause", paused)
    user.on("POST /v1/resume", EverythingAnswer([], paused_by_people=0, paused_by_pressure=0))
    assert user.said("pause --all", "--reason", "Moving.") == (
        "12 jobs paused: job-0, job-1, job-2, job-3, job-4, job-5, job-6, job-7, job-8, job-9,"
        " and 2 more.\nPaused manually: 13. By backpressure: 1.\n"
    )
    assert user.said("resume --all") == "0 jobs resumed.\nPaused manually: 0.\n"
    assert user.bodies == [{"reason": "Moving."}, None]
    assert user.json("pause --all") == msgspec.to_builtins(paused)


# Backfills --------------------------------------------------------------------------------------


def test_a_backfill_of_keys_of_a_file_and_of_a_range(user: User, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("b\n\n c \na\n")
    user.on("POST /v1/backfills", backfill())
    said = user.said("backfill start totals --key a --request-id r --keys-file", str(file))
    assert said == (
        "Backfill 7 of totals is planned: 1,000 partitions.\n"
        "'penstock backfill show 7 --wait' says how far it is.\n"
    )
    user.said("backfill start totals --start 0 --end 10 --step 5 --concurrency 9 --request-id r")
    ran = user.types("backfill start totals --keys-file - --request-id r", stdin="d\ne")
    assert ran.returncode == 0
    assert user.bodies == [
        {"job": "totals", "keys": ["a", "b", "c"], "request_id": "r"},
        {"job": "totals", "start": 0, "end": 10, "step": 5, "concurrency": 9, "request_id": "r"},
        {"job": "totals", "keys": ["d", "e"], "request_id": "r"},
    ]


def test_too_many_keys_are_one_sentence(user: User, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("".join(f"{number}\n" for number in range(100_001)))
    ran = user.types("backfill start totals --keys-file", str(file))
    assert ran.returncode == 2
    assert "A list has 100,000 partitions at most" in ran.stderr


@pytest.mark.parametrize("verb", ["backfill start totals --key a", "backfill show 7"])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (backfill(planned=1000, state="done"), 0),
        (backfill(planned=1000, state="done", dead=2), 1),
        (backfill(planned=1000, state="done", cancelled=1), 1),
        (backfill(planned=300, state="cancelled"), 1),
    ],
)
def test_waiting_is_quiet_in_a_pipe_and_ends_as_the_backfill(
    verb: str, end: Answer, code: int, user: User
) -> None:
    user.on("POST /v1/backfills", backfill())
    steps = [backfill(planned=planned, open=100) for planned in (100, 105, 400)]
    user.on("GET /v1/backfills/7", *steps, end)
    ran = user.types(f"{verb} --wait")
    assert ran.returncode == code
    assert ran.stderr == ""
    assert "partitions  1,000\n" in ran.stdout


def test_waiting_for_too_long_is_a_failure(user: User) -> None:
    user.on("GET /v1/backfills/7", backfill(planned=100, open=100))
    ran = user.types("backfill show 7 --wait --timeout 5")
    assert ran.returncode == 1
    assert "The backfill 7 of totals is not over" in ran.stderr
    assert ran.stdout == ""


def test_backfills_are_listed_shown_and_steered(user: User) -> None:
    some = [backfill(planned=1000, state="done", partitions=1000, dead=1)]
    user.on("GET /v1/backfills", BackfillsAnswer(backfills=some), BackfillsAnswer(backfills=[]))
    assert "done    totals  ranges  1,000 of 1,000  100%     0     1" in user.said("backfill list")
    assert user.types("backfill list").stderr == "No backfills.\n"
    user.on("GET /v1/backfills/7", backfill(planned=999, open=0))
    assert "ended       999 (99%), of which 0 are dead\n" in user.said("backfill show 7")
    user.on("GET /v1/backfills/7", backfill(planned=1000, state="done", dead=1, cancelled=1))
    ended = "ended       1,000 (100%), of which 1 is dead and 1 was cancelled\n"
    assert ended in user.said("backfill show 7")
    for verb, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        user.on(f"POST /v1/backfills/7/{verb}", backfill(state=state, open=2))
        said = f"Backfill 7 of totals is {state}; 2 tasks of it not over.\n"
        assert user.said(f"backfill {verb} 7") == said
        assert user.json(f"backfill {verb} 7")["state"] == state


# Tasks ------------------------------------------------------------------------------------------


def test_tasks_are_listed_by_age_with_what_is_worth_knowing(user: User) -> None:
    later = NOW + timedelta(seconds=30)
    tasks = [
        summary(id=43, status="retrying", attempt=1, due_at=later, reason="Boom.\n  at line 3"),
        summary(status="running", attempt=1, worker="w1", created_at=AN_HOUR_AGO),
    ]
    user.on("GET /v1/tasks", TasksAnswer(tasks=tasks, before=42))
    ran = user.types("task list --job clean --status running --limit 2 --before 50")
    assert ran.stdout.splitlines() == [
        "id  status    job    partition  attempt  made        worker  note",
        "43  retrying  clean  p           1 of 3  0 s ago             due in 30 s, after: Boom.",
        "42  running   clean  p           1 of 3  65 min ago  w1",
    ]
    assert ran.stderr == "note: there are more; continue with --before 42.\n"
    assert user.dispatcher.heard[0].query == "job=clean&status=running&limit=2&before=50"
    user.on("GET /v1/tasks", TasksAnswer(tasks=[], before=None))
    assert user.types("task list").stderr == "No tasks.\n"
    assert user.types("task list --job clean").stderr == "No such tasks.\n"


def test_a_task_is_shown_with_its_attempts_and_outputs(user: User) -> None:
    attempts = [
        AttemptAnswer(
            number=1,
            worker="w1",
            started_at=AN_HOUR_AGO,
            ended_at=AN_HOUR_AGO + timedelta(seconds=3),
            outcome="failed",
            reason="Boom.\n  at line 3",
            progress=None,
            log="/logs/1",
            metrics={"rows_in": 1234, "read_bytes": 2048},
        ),
        AttemptAnswer(
            number=2,
            worker="w2",
            started_at=NOW,
            ended_at=None,
            outcome=None,
            reason=None,
            progress={"rows": 5},
            log=None,
        ),
    ]
    answer = TaskAnswer(
        task=summary(status="dead", reason="Boom.\n  at line 3", settled_at=NOW),
        payload={"partition_key": "p"},
        attempts=attempts,
        published=[PublishedAnswer(dataset="sales", partition_key="p", outcome="new", revision=4)],
        consumed=[
            ConsumedAnswer(
                input="orders",
                attempt=2,
                partitions=3,
                parts=7,
                missed=1,
                is_consumed=False,
                keys=["p"],
            )
        ],
    )
    user.on("GET /v1/tasks/42", answer)
    said = user.said("task show 42")
    assert "reason      Boom.\n              at line 3\n" in said
    assert 'progress    {"rows": 5}\n' in said
    assert "      1  failed   w1      65 min ago  3 s   /logs/1  Boom.\n" in said
    assert "      2  running  w2      0 s ago     0 s\n" in said
    assert "sales      p          new         4\n" in said
    assert "orders               3      7       1  no, read by attempt 2\n" in said
    assert "attempt 1      took\nrows_in       1,234\nread_bytes  2.0 KiB\n" in said
    assert user.json("task show 42")["task"]["settled_at"] == "2030-01-01T00:00:00Z"


def test_a_task_that_rewrites_files_says_which(user: User) -> None:
    about = {"dataset": "sales", "partition_key": "p", "revision": 3}
    answer = TaskAnswer(
        task=summary(status="queued"), payload={"maintain": about}, attempts=[], published=[]
    )
    user.on("GET /v1/tasks/42", answer)
    assert "rewrites    sales, partition p\n" in user.said("task show 42")


def test_tasks_are_cancelled_one_by_one(user: User) -> None:
    asked = TaskStateAnswer(task_id=2, status="running", attempt=1, cancel_asked=True)
    results = [
        TaskResult(task_id=1, status=200),
        TaskResult(task_id=2, status=200, state=asked),
        TaskResult(task_id=3, status=409, why="over", detail="Task 3 is completed."),
    ]
    body = msgspec.json.encode(ResultsAnswer(results=results))
    user.on("POST /v1/tasks/cancel", Reply(body, 207))
    ran = user.types("task cancel 1 2 3 1 --reason Wrong.")
    assert ran.returncode == 1
    assert ran.stdout == "1  cancelled\n2  is running and was asked to stop\n"
    assert ran.stderr == "penstock: Task 3 is completed.\n"
    assert user.bodies == [{"tasks": [1, 2, 3], "reason": "Wrong."}]
    assert len(user.json("task cancel 1 2 3", code=1)["results"]) == 3


def test_dead_tasks_are_replayed(user: User) -> None:
    user.on("POST /v1/tasks/replay", ResultsAnswer(results=[TaskResult(task_id=1, status=200)]))
    assert user.said("task replay 1") == "1  queued again\n"
    no = TaskResult(task_id=1, status=404, why="unknown", detail="There is no task 1.")
    user.on("POST /v1/tasks/replay", problem(404, results=[no]))
    ran = user.types("task replay 1")
    assert (ran.returncode, ran.stderr) == (1, "penstock: There is no task 1.\n")


def _tasks(*ids: int, before: int | None = None) -> TasksAnswer:
    return TasksAnswer(tasks=[summary(id=each) for each in ids], before=before)


def _done(*ids: int) -> ResultsAnswer:
    return ResultsAnswer(results=[TaskResult(task_id=each, status=200) for each in ids])


def test_all_dead_tasks_of_a_job_are_replayed_in_pages_after_a_yes(user: User) -> None:
    user.on("GET /v1/tasks", _tasks(5, 4, before=4), _tasks(3))
    user.on("POST /v1/tasks/replay", _done(5, 4, 3))
    ran = user.types("task replay --job clean --status dead")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "3 tasks of clean will be queued again." in ran.stderr
    assert "--yes" in ran.stderr
    asked = [each.query for each in user.dispatcher.heard]
    assert asked == [
        "job=clean&status=dead&limit=1000",
        "job=clean&status=dead&limit=1000&before=4",
    ]
    user.on("GET /v1/tasks", _tasks(5, 4, before=4), _tasks(3))
    assert user.said("task replay --job clean --yes") == "3 tasks queued again.\n"
    assert user.bodies[-1] == {"tasks": [5, 4, 3]}
    user.on("GET /v1/tasks", _tasks())
    assert user.said("task replay --job clean") == "0 tasks queued again.\n"


def test_all_open_tasks_of_a_job_are_cancelled(user: User) -> None:
    user.on("GET /v1/tasks", _tasks(9), _tasks(), _tasks(8, 7))
    asked = TaskStateAnswer(task_id=9, status="running", attempt=1, cancel_asked=True)
    results = [
        TaskResult(task_id=9, status=200, state=asked),
        TaskResult(task_id=8, status=200),
        *(
            TaskResult(task_id=each, status=409, why="over", detail=f"Task {each} is over.")
            for each in range(12)
        ),
    ]
    user.on("POST /v1/tasks/cancel", ResultsAnswer(results=results))
    ran = user.types("task cancel --job clean --partition p --yes")
    assert ran.returncode == 1
    assert ran.stdout == "1 task cancelled.\n1 task runs, asked to stop.\n"
    assert ran.stderr.count("is over.") == 10
    assert "and 2 more like these." in ran.stderr
    statuses = [each.query for each in user.dispatcher.heard[:3]]
    assert [each.split("&")[1] for each in statuses] == [
        *("status=running", "status=retrying", "status=queued"),
    ]
    assert all("partition_key=p" in each for each in statuses)
    assert user.bodies[-1] == {"tasks": [9, 8, 7]}


def _attempt(number: int, *, is_over: bool = True, log: str | None = None) -> AttemptAnswer:
    return AttemptAnswer(
        number=number,
        worker="w1",
        started_at=AN_HOUR_AGO,
        ended_at=NOW if is_over else None,
        outcome="completed" if is_over else None,
        reason=None,
        progress=None,
        log=log,
    )


def _had(*attempts: AttemptAnswer) -> TaskAnswer:
    return TaskAnswer(task=summary(), payload={}, attempts=list(attempts), published=[])


def test_the_log_of_an_attempt_is_printed_if_it_is_here(user: User, tmp_path: Path) -> None:
    first, second = tmp_path / "42-1.log", tmp_path / "42-2.log"
    first.write_bytes(b"first \xff\n")
    second.write_text("zweiter ö\n")
    both = _had(_attempt(1, log=str(first)), _attempt(2, log=str(second)))
    user.on("GET /v1/tasks/42", both)
    assert user.said("task logs 42") == "zweiter ö\n"
    assert user.said("task logs 42 --attempt 1") == "first \ufffd\n"
    assert user.said("task logs 42 --follow") == "zweiter ö\n"
    found = user.json("task logs 42")
    assert (found["attempt"], found["log"], found["text"]) == (2, str(second), "zweiter ö\n")
    ran = user.types("task logs 42 --attempt 3")
    assert (ran.returncode, "it has 1, 2" in ran.stderr) == (1, True)
    # On this machine, and without a file: it has no output.
    second.unlink()
    ran = user.types("task logs 42")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "attempt 2 of task 42 has no output." in ran.stderr
    found = user.json("task logs 42")
    assert (found["log"], found["text"]) == (None, "")
    elsewhere = tmp_path / "elsewhere" / "42-2.log"
    user.on("GET /v1/tasks/42", _had(_attempt(2, log=str(elsewhere))))
    ran = user.types("task logs 42")
    assert ran.returncode == 1
    assert f"has its log on the machine of worker w1: {elsewhere}." in ran.stderr


def test_a_log_that_is_none_of_the_attempt_is_not_read(user: User, tmp_path: Path) -> None:
    """Where the log is is said by who reports the end: a function of somebody's, too."""
    secret = tmp_path / "secret"
    secret.write_text("of another")
    link = tmp_path / "42-1.log"
    link.symlink_to(secret)
    for said in (secret, tmp_path / "42-2.log", f"{tmp_path}/logs/../secret"):
        user.on("GET /v1/tasks/42", _had(_attempt(1, log=str(said))))
        ran = user.types("task logs 42")
        assert (ran.returncode, ran.stdout) == (1, "")
        assert "which is not its log, so it is not read." in ran.stderr
    user.on("GET /v1/tasks/42", _had(_attempt(1, log=str(link))))
    assert "of another" not in user.types("task logs 42").stdout


def test_the_log_of_what_runs_is_looked_for_in_the_data_folder(user: User, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "logs"
    folder.mkdir(parents=True)
    log = folder / "42-1.log"
    log.write_text("one\n")
    user.on("GET /v1/tasks/42", _had(_attempt(1, is_over=False)))
    data = ("--data", str(tmp_path / "data"))
    assert user.said("task logs 42", *data) == "one\n"
    environment = {"PENSTOCK_DATA": str(tmp_path / "data")}
    assert user.types("task logs 42", environment=environment).stdout == "one\n"
    ran = user.types("task logs 42", "--data", str(tmp_path / "other"))
    assert (ran.returncode, "its log is on the machine of worker w1" in ran.stderr) == (1, True)
    user.on("GET /v1/tasks/42", _had())
    ran = user.types("task logs 42", *data)
    assert (ran.returncode, "no attempt yet; it is queued" in ran.stderr) == (1, True)


def test_a_log_is_followed_until_its_attempt_has_ended(user: User, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "logs"
    folder.mkdir(parents=True)
    log = folder / "42-1.log"
    log.write_bytes(b"eins " + b"\xc3")
    running, over = _attempt(1, is_over=False), _attempt(1)
    user.on("GET /v1/tasks/42", _had(running), _had(running), _had(over))

    class Writing(Hurried):
        """While somebody waits, the attempt prints."""

        async def sleep(self, seconds: float) -> None:
            with log.open("ab") as opened:
                opened.write(b"\xb6" if not self._slept else b" end\n")
            await super().sleep(seconds)

    with mock.patch("penstock.cli.task.SystemClock", Writing):
        said = user.said("task logs 42 --follow", "--data", str(tmp_path / "data"))
    assert said == "eins ö end\n"


# Datasets and the outbox ------------------------------------------------------------------------


def test_datasets_and_partitions_are_listed(user: User) -> None:
    generations = [
        GenerationAnswer(version="g2", state="building", partitions=3, created_at=NOW),
        GenerationAnswer(version="g1", state="current", partitions=5, created_at=AN_HOUR_AGO),
    ]
    found = DatasetAnswer(name="sales", uuid="u", job="clean", generations=generations)
    user.on("GET /v1/datasets", DatasetsAnswer(datasets=[found]), DatasetsAnswer(datasets=[]))
    assert user.said("dataset list").splitlines() == [
        "dataset  written by  state     partitions  made        generation",
        "sales    clean       building           3  0 s ago     g2",
        "sales    clean       current            5  65 min ago  g1",
    ]
    assert "penstock dag apply FILE" in user.types("dataset list").stderr
    partition = PartitionAnswer(
        partition_key="",
        start=None,
        end=None,
        location="s3://b/x",
        task_id=42,
        attempt=1,
        revision=2,
        published_at=NOW,
        files=1,
        rows=2000,
        bytes=3072,
    )
    page = PartitionsAnswer(generation="g1", partitions=[partition], after="k")
    user.on("GET /v1/datasets/sales/partitions", page)
    ran = user.types("dataset partitions sales --limit 1 --after a --generation g1")
    row = "(whole)    0 s ago           2  2,000  3.0 KiB      1    42  s3://b/x\n"
    assert row in ran.stdout
    assert ran.stderr == "note: there are more; continue with --after 'k'.\n"
    assert user.dispatcher.heard[-1].query == "generation=g1&after=a&limit=1"


def test_messages_that_could_not_be_sent_are_listed_and_tried_again(user: User) -> None:
    row = OutboxRow(
        id=17,
        kind="wake",
        target="mine:clean/normal",
        tries=20,
        last_error="Denied.",
        created_at=AN_HOUR_AGO,
        parked_at=NOW,
    )
    user.on("GET /v1/outbox", OutboxAnswer(parked=[row]), OutboxAnswer(parked=[]))
    said = user.said("outbox list")
    assert "17  wake  mine:clean/normal     20  65 min ago  Denied.\n" in said
    assert user.types("outbox list").stdout == ""
    user.on("POST /v1/outbox/retry", OutboxRetryAnswer(retried=1))
    ran = user.types("outbox retry 17 18 17")
    assert (ran.returncode, ran.stdout) == (1, "1 message of 2 will be retried.\n")
    assert "One message is not there, or still tried." in ran.stderr
    assert user.bodies[-1] == {"ids": [17, 18]}
    assert user.said("outbox retry 17") == "1 message of 1 will be retried.\n"


_WITHOUT_HTTPX = """
import sys
sys.modules["httpx"] = None
from penstock.cli import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("status", "--url", "http://127.0.0.1:1"), 1, "No dispatcher answers at"),
        (("dag", "list", "--url", "http://127.0.0.1:1"), 1, "No dispatcher answers at"),
        (("--help",), 0, ""),
        (("backfill", "start", "--help"), 0, ""),
    ],
)
def test_these_verbs_need_no_package_besides_those_of_penstock_itself(
    words: tuple[str, ...], code: int, said: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT_HTTPX, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_cut_over_by_hand(user: User) -> None:
    user.on("POST /v1/datasets/sales/cut-over", CutOverAnswer(dataset="sales", generation="g-2"))
    assert user.said("dataset cut-over sales --force") == "Readers of sales read g-2 now.\n"
    told = {"kept": None, "is_waiting": False}
    assert user.json("dataset cut-over sales") == {"dataset": "sales", "generation": "g-2", **told}
    assert user.bodies[0] == {"force": True}
    answer = CutOverAnswer(dataset="sales", generation="g-1", kept=18, is_waiting=True)
    user.on("POST /v1/datasets/sales/cut-over", answer)
    assert user.said("dataset cut-over sales --keep") == (
        "Carried over: 18 publications.\n"
        "Readers of sales read g-1 until all is built that is computed of it.\n"
    )
    assert user.bodies[-1] == {"keep": True}


def test_a_cut_over_that_is_refused_is_a_failure(user: User) -> None:
    user.on("POST /v1/datasets/sales/cut-over", problem(409, title="It is not over."))
    ran = user.types("dataset cut-over sales")
    assert ran.returncode == 1
    assert "It is not over." in ran.stderr
    assert len(user.dispatcher.heard) == 1


def test_operators_and_their_limits(user: User) -> None:
    load = OperatorLoad(name="m:f", in_flight=2, in_flight_max=3, waiting=1500, desired=3)
    user.on("GET /v1/operators", OperatorsAnswer(operators=[load]))
    assert user.said("operator list").splitlines()[1].split() == ["m:f", "2", "3", "1,500", "3"]
    assert user.json("operator list")["operators"][0]["desired"] == 3
    user.on("PUT /v1/operators/m:f", OperatorLimitAnswer(name="m:f", in_flight_max=3))
    assert user.said("operator limit m:f 3") == "At most 3 tasks of m:f run at a time.\n"
    user.on("PUT /v1/operators/m:f", OperatorLimitAnswer(name="m:f", in_flight_max=None))
    assert user.said("operator limit m:f --none") == "m:f has no limit.\n"
    assert [each for each in user.bodies if each] == [
        {"in_flight_max": 3},
        {"in_flight_max": None},
    ]


@pytest.mark.parametrize("line", ["operator limit m:f", "operator limit m:f 3 --none"])
def test_a_limit_is_a_number_or_none(line: str, user: User) -> None:
    ran = user.types(line)
    assert ran.returncode == 2
    assert "Give a number, or --none" in ran.stderr
