"""`penstock dag`: what it says of files, good and bad, and with which exit code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import run
from tests.e2e.command import PENSTOCK, penstock

EXAMPLE = Path(__file__).parents[2] / "examples" / "five_jobs.yaml"
VERBS = ("check", "show", "diff")

SMALL = """\
jobs:
  tick:
    activation: source
    source: {kind: manual}
    outputs: [ticks]
  work:
    runtime: process
    operator: mine:work
    inputs: [ticks]
"""
BAD = """\
jobs:
  tick:
    activation: source
    source: {kind: manual}
    outputs: [ticks]
  work:
    runtime: process
    operator: mine:work
    inputs: [tocks]
    timeout: soon
    colour: red
"""


@dataclass(frozen=True)
class User:
    """Somebody in a folder with DAG files."""

    folder: Path

    def file(self, name: str, text: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    def edited(self, name: str, *edits: tuple[str, str]) -> str:
        """The example with some of its text replaced."""
        text = EXAMPLE.read_text()
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        return self.file(name, text)

    def dag(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command within this process, which is quicker."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        out, errors = io.StringIO(), io.StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(errors):
                code = run(["dag", *words])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())

    def json(self, *words: str, code: int = 0) -> Any:
        ran = self.dag(*words, "--json")
        assert ran.returncode == code, ran.stderr
        return json.loads(ran.stdout)


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_its_exit_codes(verb: str, user: User) -> None:
    ran = user.dag(verb, "--help")
    assert ran.returncode == 0
    assert f"Example: penstock dag {verb}" in ran.stdout
    assert "Exit code 0: " in ran.stdout


def test_alone_it_shows_the_verbs() -> None:
    ran = penstock("dag")
    assert ran.returncode == 0
    listed = ran.stdout.partition("Commands:")[2]
    assert all(f"  {verb} " in listed for verb in VERBS)
    assert "..." not in listed


def test_an_unknown_verb_is_one_sentence(user: User) -> None:
    ran = user.dag("chekc")
    assert ran.returncode == 2
    assert "No such command 'chekc'" in ran.stderr


def test_the_example_has_no_problems() -> None:
    ran = penstock("dag", "check", str(EXAMPLE))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "No problems in 1 file: 5 jobs, 5 datasets.\n"


def test_check_counts_over_several_files(user: User) -> None:
    user.file("mine.py", "def work(task): ...\n")
    ran = user.dag("check", str(EXAMPLE), user.file("small.yaml", SMALL))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "No problems in 2 files: 7 jobs, 6 datasets.\n"


def test_check_says_all_problems_of_a_file_with_line_and_field(user: User) -> None:
    bad = user.file("bad.yaml", BAD)
    ran = user.dag("check", bad)
    assert ran.returncode == 2
    lines = ran.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{bad}:9: jobs.work.inputs[0]: There is no dataset 'tocks'.")
    assert lines[1].startswith(f"{bad}:10: jobs.work.timeout: 'soon' ")
    assert lines[2].startswith(f"{bad}:11: jobs.work")
    assert "colour" in lines[2]
    assert ran.stderr == "penstock: 3 problems; 1 of 1 file cannot be used.\n"


def test_check_says_more_problems_than_an_error_message_would(user: User) -> None:
    wrong = "".join(f"    wrong{number}: 1\n" for number in range(150))
    ran = user.dag("check", user.file("bad.yaml", SMALL + wrong))
    assert ran.returncode == 2
    assert len(ran.stdout.splitlines()) == 150


def test_check_goes_on_after_a_file_that_is_wrong(user: User) -> None:
    user.file("mine.py", "from other import *\n")
    good, bad = user.file("good.yaml", SMALL), user.file("bad.yaml", BAD)
    missing = str(user.folder / "missing.yaml")
    ran = user.dag("check", missing, bad, good)
    assert ran.returncode == 2
    assert len(ran.stdout.splitlines()) == 3
    assert ran.stderr.splitlines() == [
        f"penstock: There is no file {missing!r}.",
        "penstock: 3 problems; 2 of 3 files cannot be used.",
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", ":1: It is empty; write `jobs:` and a job below it."),
        (b"# nothing yet\n", ":1: It is empty; write `jobs:` and a job below it."),
        (b"jobs: [\n", ": It is not valid YAML: "),
        (b"jobs: {}\n", ":1: jobs: There are no jobs; write one."),
    ],
)
def test_a_file_that_says_nothing_is_one_line(body: bytes, said: str, user: User) -> None:
    ran = user.dag("check", user.file("bad.yaml", body))
    assert ran.returncode == 2
    assert said in ran.stdout
    assert len(ran.stdout.splitlines()) == 1


UNREADABLE = [
    ("missing.yaml", None, "There is no file '{}'."),
    (".", None, "'{}' is a folder; name a file in it."),
    ("latin.yaml", "jobs:\n  # caf\xe9\n".encode("latin-1"), "'{}' is not UTF-8, as line 2 shows"),
    ("utf16.yaml", SMALL.encode("utf-16"), "'{}' is not UTF-8, as line 1 shows"),
    ("huge.yaml", b"#" * 1_000_001, "'{}' is larger than 1,000,000 bytes; make several"),
    ("x" * 300, None, "'{}' cannot be read: File name too long."),
]


@pytest.mark.parametrize(("name", "body", "said"), UNREADABLE)
@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_cannot_be_read_is_one_sentence(
    verb: str, name: str, body: bytes | None, said: str, user: User
) -> None:
    file = str(user.folder / name) if body is None else user.file(name, body)
    ran = user.dag(verb, *([str(EXAMPLE)] if verb == "diff" else []), file)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith(f"penstock: {said.format(file)}")
    assert len(ran.stderr.splitlines()) == 1


def test_what_never_ends_is_too_large(user: User) -> None:
    ran = user.dag("check", "/dev/zero")
    assert ran.returncode == 2
    assert "'/dev/zero' is larger than 1,000,000 bytes" in ran.stderr


def test_a_name_that_is_no_text_can_be_said(user: User) -> None:
    missing = os.fsencode(user.folder) + b"/\xff.yaml"
    ran = subprocess.run(
        [os.fsencode(PENSTOCK), b"dag", b"check", missing],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.decode() == f"penstock: There is no file '{user.folder}/\ufffd.yaml'.\n"


def test_a_mark_of_byte_order_does_no_harm(user: User) -> None:
    marked = user.file("marked.yaml", SMALL.encode("utf-8-sig"))
    assert user.dag("diff", marked, user.file("plain.yaml", SMALL)).returncode == 0


@pytest.mark.parametrize("verb", ["show", "diff"])
def test_the_other_verbs_refuse_a_file_with_problems(verb: str, user: User) -> None:
    bad = user.file("bad.yaml", BAD)
    ran = user.dag(verb, *([str(EXAMPLE)] if verb == "diff" else []), bad)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith(f"penstock: {bad} has 3 problems:\n  {bad}:9: jobs.work.inputs")


def test_show_draws_the_tree_and_says_what_each_job_reads() -> None:
    ran = penstock("dag", "show", str(EXAMPLE))
    assert ran.returncode == 0, ran.stderr
    tree, inputs, version = ran.stdout.split("\n\n")
    assert tree.splitlines() == [
        "ingest           manual; writes hours",
        "└─ clean         process five_jobs:clean; writes sales",
        "   ├─ outliers   process five_jobs:outliers; writes outliers; bulk",
        "   └─ totals     process five_jobs:totals; writes totals",
        "      └─ report  process five_jobs:report; reads outliers, totals; writes report",
    ]
    assert inputs.splitlines() == [
        "job       reads     written by  as       where",
        "clean     hours     ingest",
        'outliers  sales     clean                partition_key not glob "test-*"',
        "totals    sales     clean",
        "report    outliers  outliers    remarks",
        "report    totals    totals",
    ]
    assert version.startswith("version ")


SPARK = (
    SMALL
    + """\
  more:
    activation: source
    source: {kind: manual}
    outputs: [more]
  join:
    runtime: spark
    operator: spark.sql
    config: {sql_file: sql/join.sql}
    when: all
    inputs:
      - ticks
      - more
      - {from: more, as: planes, trigger: false, read: all}
    outputs: [{name: joined, keep: {partitions: 30, age: 2d}}]
"""
)


BACK = """\
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean: {runtime: process, operator: "a:f", inputs: [raw], outputs: [tidy]}
  moving: {runtime: process, operator: "a:f", inputs: [{from: tidy, lookback: 3d}]}
"""


def test_show_says_how_inputs_are_read(user: User) -> None:
    (user.folder / "sql").mkdir()
    user.file("sql/join.sql", "SELECT * FROM ticks\n")
    ran = user.dag("show", user.file("spark.yaml", SPARK))
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert "job reads written by as where how" in lines
    assert "join ticks tick waited for" in lines
    assert "join more more planes no trigger, all partitions" in lines
    file = user.file("back.yaml", BACK)
    lines = [" ".join(line.split()) for line in user.dag("show", file).stdout.splitlines()]
    assert "moving tidy clean and 3d before" in lines


def test_a_query_in_a_file_is_part_of_the_dag(user: User) -> None:
    (user.folder / "sql").mkdir()
    file = user.file("spark.yaml", SPARK)
    ran = user.dag("check", file)
    assert ran.returncode == 2
    assert ran.stdout == (
        f"{file}:17: jobs.join.config.sql_file: There is no file 'sql/join.sql' in the folder of"
        " the DAG.\n"
    )
    user.file("sql/join.sql", "SELECT * FROM ticks\n")
    assert user.dag("check", file).returncode == 0
    told = user.json("show", file)
    assert told["jobs"]["join"]["config"] == {
        "sql": "SELECT * FROM ticks\n",
        "sql_file": "sql/join.sql",
    }
    # The definition is a DAG file too, which needs no other file.
    (user.folder / "stored").mkdir()
    stored = user.file("stored/spark.json", json.dumps(told))
    assert user.dag("diff", stored, file).returncode == 0
    user.file("sql/join.sql", "SELECT 2\n")
    edited = user.json("diff", stored, file, code=1)
    assert edited["changed"] == {"join": {"fields": ["config"], "keeps_generation": False}}


def test_show_leaves_the_table_out_where_nothing_is_read(user: User) -> None:
    source = SMALL.partition("  work:")[0]
    tree, version = user.dag("show", user.file("source.yaml", source)).stdout.split("\n\n")
    assert tree == "tick  manual; writes ticks"
    assert version.startswith("version ")


def test_the_json_of_show_is_the_definition_that_the_version_names(user: User) -> None:
    shown = user.dag("show", str(EXAMPLE)).stdout
    said = user.dag("show", str(EXAMPLE), "--json").stdout
    assert set(json.loads(said)["jobs"]) == {"ingest", "clean", "totals", "outliers", "report"}
    digest = hashlib.sha256(said.removesuffix("\n").encode()).hexdigest()
    assert shown.endswith(f"version {digest}\n")
    stored = user.file("stored.yaml", said)
    assert user.dag("check", stored).returncode == 0
    assert user.dag("diff", str(EXAMPLE), stored).returncode == 0


def test_files_that_say_the_same_do_not_differ(user: User) -> None:
    other = user.edited("other.yaml", ("10k", "10_000"), ("timeout: 10m", "timeout: 600s"))
    ran = user.dag("diff", str(EXAMPLE), other)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == (
        "Unchanged: clean, ingest, outliers, report and totals.\nThe files are identical.\n"
    )
    found = user.json("diff", str(EXAMPLE), other)
    assert found["same"] is True
    assert found["old_version"] == found["new_version"]
    assert found["unchanged"] == ["clean", "ingest", "outliers", "report", "totals"]


def test_a_change_of_timing_alone_rebuilds_nothing(user: User) -> None:
    slower = user.edited("slower.yaml", ("timeout: 10m", "timeout: 20m"))
    ran = user.dag("diff", str(EXAMPLE), slower)
    assert ran.returncode == 1
    assert "changed  clean  timeout; keeps its generation\n" in ran.stdout
    assert ran.stdout.endswith("No job gets a new generation.\n")
    found = user.json("diff", str(EXAMPLE), slower, code=1)
    assert found["same"] is False
    assert found["changed"] == {"clean": {"fields": ["timeout"], "keeps_generation": True}}
    assert found["new_generations"] == []
    assert found["old_version"] != found["new_version"]


def test_an_edit_rebuilds_what_is_downstream_and_nothing_else(user: User) -> None:
    dollars = user.edited("dollars.yaml", ("EUR", "USD"))
    ran = user.dag("diff", str(EXAMPLE), dollars)
    assert ran.returncode == 1
    assert ran.stdout == (
        "change   job     what\n"
        "changed  totals  config; new generation\n"
        "rebuilt  report  because of totals; new generation\n"
        "\n"
        "Unchanged: clean, ingest and outliers.\n"
        "2 jobs get a new generation.\n"
    )
    found = user.json("diff", str(EXAMPLE), dollars, code=1)
    assert found["rebuilt"] == {"report": {"because_of": ["totals"]}}
    assert found["new_generations"] == ["report", "totals"]


def test_added_and_removed_jobs_are_told_by_direction(user: User) -> None:
    extra = (
        "  extra:\n    runtime: process\n    operator: mine:extra\n    inputs: [totals.totals]\n"
    )
    larger = user.file("larger.yaml", EXAMPLE.read_text() + extra)
    there = user.dag("diff", str(EXAMPLE), larger)
    assert there.returncode == 1
    assert "added   extra  new generation\n" in there.stdout
    assert there.stdout.endswith("1 job gets a new generation.\n")
    back = user.json("diff", larger, str(EXAMPLE), code=1)
    assert (back["added"], back["removed"]) == ([], ["extra"])
    assert "removed  extra\n" in user.dag("diff", larger, str(EXAMPLE)).stdout


def test_a_job_that_was_only_renamed_is_not_blamed_for_a_rebuild(user: User) -> None:
    other = user.edited(
        "other.yaml",
        ("  outliers:\n", "  strange:\n"),
        ("from: outliers.outliers", "from: strange.outliers"),
        ("EUR", "USD"),
    )
    found = user.json("diff", str(EXAMPLE), other, code=1)
    assert (found["added"], found["removed"]) == (["strange"], ["outliers"])
    assert found["rebuilt"] == {"report": {"because_of": ["totals"]}}


_WITHOUT_YAML = """
import sys
sys.modules["yaml"] = None
from penstock.cli import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("dag", "diff", "a", "b"), 2, "pip install 'penstock[dispatcher]'"),
        (("queue", "--help"), 0, ""),
    ],
)
def test_without_yaml_only_these_verbs_are_missing(
    words: tuple[str, ...], code: int, said: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT_YAML, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
