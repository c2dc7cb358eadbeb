"""What the command says, where it says it, and with which exit code."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.store.s3.local import LocalS3
from tests.e2e.command import PENSTOCK, penstock


def test_alone_it_shows_what_one_can_do() -> None:
    ran = penstock()
    assert ran.returncode == 0
    assert "doctor" in ran.stdout
    assert "What next?" in ran.stdout


@pytest.mark.parametrize("verb", ["demo", "doctor"])
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    ran = penstock(verb, "--help")
    assert ran.returncode == 0
    assert f"Example: penstock {verb}" in ran.stdout


def test_an_unknown_verb_is_one_sentence() -> None:
    ran = penstock("docter")
    assert ran.returncode == 2
    assert "No such command 'docter'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("bucket", 2, "penstock: 'bucket' is not the URL of a store."),
        ("s3a://key:hunter2@bucket", 2, "'s3a://' is not the URL of a store."),
        ("s3://key:hunter2@bucket", 2, "Credentials do not go into the URL"),
        ("s3://[b", 2, "cannot be read"),
        ("file:///tmp/a#b", 2, "must be written as %23"),
        ("s3://", 2, "is not a bucket name"),
        ("s3://Not_A_Bucket/x", 2, "is not a bucket name"),
        ("s3://bucket?colour=red", 2, "'colour'"),
        ("file://relative/folder", 2, "must name an absolute folder"),
        ("file:///nowhere/at/all", 1, "does not exist"),
        ("memory://x?y=z", 2, "must not have options"),
        ("s3://bucket?endpoint=http://127.0.0.1:1", 1, "cannot be reached"),
    ],
)
def test_bad_urls_are_one_sentence_and_a_next_step(url: str, code: int, said: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    ran = penstock("doctor", url, environment=keys)
    assert ran.returncode == code
    assert said in ran.stderr
    assert "hunter2" not in ran.stderr
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr


def test_debug_shows_the_traceback() -> None:
    ran = penstock("--debug", "doctor", "bucket")
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr


def test_doctor_gives_a_folder_a_clean_bill_and_leaves_it_clean(tmp_path: Path) -> None:
    ran = penstock("doctor", f"file://{tmp_path}/bucket")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "BAD" not in ran.stdout
    assert "two processes, one winner: 3 rounds" in ran.stdout
    assert "keeps every promise" in ran.stdout
    assert [path.name for path in (tmp_path / "bucket").iterdir()] == [".penstock"]


def test_doctor_speaks_json(tmp_path: Path) -> None:
    ran = penstock("doctor", f"file://{tmp_path}/bucket", "--json")
    report = json.loads(ran.stdout)
    assert ran.returncode == 0
    assert report["trusted"] is True
    assert len(report["checks"]) >= 14
    assert {check["mark"] for check in report["checks"]} == {"good"}
    assert report["requests"] > 100
    assert report["dollars_per_month"] == pytest.approx(30 * report["dollars"])


def test_doctor_gives_a_real_s3_server_a_clean_bill(local_s3: LocalS3) -> None:
    keys = {
        "AWS_ACCESS_KEY_ID": local_s3.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": local_s3.credentials.secret_key,
        "AWS_ENDPOINT_URL": local_s3.endpoint,
    }
    ran = penstock("doctor", "s3://penstock/doctor-test", "--json", environment=keys)
    report = json.loads(ran.stdout)
    assert ran.returncode == 0, report["verdict"]
    assert report["trusted"] is True


def test_a_reader_that_leaves_is_no_error_worth_a_traceback() -> None:
    ran = subprocess.run(
        f"{PENSTOCK} doctor memory:// | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout.startswith("ok")
    assert "Traceback" not in ran.stderr


@pytest.mark.timeout(400)
def test_the_demo_of_the_queue_runs() -> None:
    # Sixteen writers of one object: SeaweedFS has each loser wait whole seconds.
    ran = penstock("demo", "queue", seconds=380)
    assert ran.returncode == 0, ran.stderr
    assert "60 of 60 tasks are completed, each once;" in ran.stdout
    assert "30 of 30 partitions of the result are published, each once." in ran.stdout
    assert "320 additions were made, and the object says 320." in ran.stdout
    assert "BAD" not in ran.stdout


def _started(*words: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """A command that has said its first line."""
    running = subprocess.Popen(
        [PENSTOCK, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    assert running.stdout is not None
    assert running.stdout.readline()
    return running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_doctor_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    running = _started("doctor", f"file://{tmp_path}/bucket", environment={})
    os.killpg(running.pid, number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode in (0, 128 + number)  # 0 if it was faster than the signal
    assert "Traceback" not in errors
    assert [path.name for path in (tmp_path / "bucket").iterdir()] == [".penstock"]


@pytest.mark.parametrize("words", [("demo",), ("demo", "queue")], ids=" ".join)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_of_a_demo(
    words: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    running = _started(*words, environment={"TMPDIR": str(tmp_path)})
    os.killpg(running.pid, number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def _on_a_terminal(*words: str, environment: dict[str, str]) -> str:
    """What a command shows on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([PENSTOCK, *words], stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        shown = b""
        # Linux ends a terminal whose last writer has left with an error.
        with suppress(OSError):
            while chunk := os.read(ours, 4096):
                shown += chunk
    os.close(ours)
    return shown.decode()


def test_colours_are_for_terminals_that_want_them() -> None:
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    green = "\x1b[32m"
    assert green in _on_a_terminal("doctor", "memory://", environment=plain)
    silent = _on_a_terminal("doctor", "memory://", environment={**plain, "NO_COLOR": "1"})
    assert "keeps every promise" in silent
    assert green not in silent
    assert green not in penstock("doctor", "memory://").stdout
