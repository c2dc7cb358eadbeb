"""What a task is handed: there before it runs, renewed in place, gone when it has ended."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.dispatcher.wire.problem import Problem
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import Made, Voice, Work
from penstock.worker import belongings
from penstock.worker.handing import MINT_SECONDS_MAX
from tests.unit.worker.bench import Bench, Doing, nothing, play
from tests.unit.worker.test_worker import HEARTBEAT, waiting

MINT = "/v1/task/credentials"
AWAY = Problem(type="unavailable", title="STS is away.", status=503)


class Watching:
    """Work that waits until it is let go, and looks at what it has."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.free = asyncio.Event()

    async def __call__(self, work: Work, voice: Voice) -> tuple[Made, ...]:
        self.works.append(work)
        await self.free.wait()
        return await nothing(work, voice)

    @property
    def token(self) -> str:
        assert self.works[-1].handed is not None
        return self.works[-1].handed.token

    @property
    def key(self) -> str:
        assert self.works[-1].handed is not None
        found = self.works[-1].handed.credentials
        return "" if found is None else found.access_key


Tale = Callable[[Bench, Watching], Awaitable[None]]


def tell(folder: Path, story: Tale, **fields: object) -> None:
    """A story with one task whose work waits; once, because files are real."""
    watching = Watching()

    async def main(bench: Bench) -> None:
        watching.free = asyncio.Event()
        await story(bench, watching)
        watching.free.set()
        await bench.until(lambda: not bench.runtime.running)

    setting = waiting(1, **{"heartbeat_seconds": 30.0, **fields})
    play(main, setting=setting, doing=watching, handed=folder / "handed", seeds=[1])
    assert list((folder / "handed").iterdir()) == [], "nothing is left"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(folder: Path) -> dict[str, int]:
    """The files there are, and their modes."""
    return {each.name: mode(each) for each in folder.glob("*")}


def test_a_token_is_there_renewed_and_gone(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        await bench.until(lambda: bool(watching.works))
        handed = watching.works[0].handed
        assert handed is not None
        folder = Path(handed.folder)
        assert watching.token == "cap.1.1-0"
        assert handed.variables == {"PENSTOCK_TASK_TOKEN_FILE": str(folder / "token")}
        assert handed.credentials is None
        assert mode(folder) == 0o700
        assert mode(folder.parent) == 0o711
        reader = os.open(folder / "token", os.O_RDONLY)
        await bench.until(lambda: bench.dispatcher.paths()[HEARTBEAT] == 2)
        await bench.clock.sleep(0.1)
        assert watching.token == "cap.1.1-2"
        # Replaced, and not written over: whoever reads finds one that is whole.
        assert os.read(reader, 100) == b"cap.1.1-0"
        os.close(reader)
        assert files(folder) == {"token": 0o600}
        watching.free.set()
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert files(folder) == {}

    tell(tmp_path, story)


def test_credentials_are_there_before_the_work_and_are_renewed_in_time(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        await bench.until(lambda: bool(watching.works))
        handed = watching.works[0].handed
        assert handed is not None
        folder = Path(handed.folder)
        said = json.loads((folder / "credentials.json").read_text())
        assert said.pop("Expiration").endswith("+00:00")
        assert said == {
            "Version": 1,
            "AccessKeyId": "key-1",
            "SecretAccessKey": "secret-1",
            "SessionToken": "session-1",
        }
        assert (folder / "aws.config").read_text() == (
            f"[default]\ncredential_process = cat {folder}/credentials.json\nregion = eu-west-1\n"
        )
        assert set(files(folder).values()) == {0o600}
        assert handed.variables == {
            "PENSTOCK_TASK_TOKEN_FILE": f"{folder}/token",
            "AWS_CONFIG_FILE": f"{folder}/aws.config",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": "eu-west-1",
            "AWS_DEFAULT_REGION": "eu-west-1",
            "AWS_ENDPOINT_URL_S3": "http://store",
        }
        assert "secret-1" not in repr(watching.works)
        took = await bench.until(lambda: bench.dispatcher.minted == 2)
        assert 590 < took < 610
        await bench.clock.sleep(0.1)
        assert watching.key == "key-2"

    tell(tmp_path, story, mints=True)


def test_where_none_are_minted_none_are_asked_for(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        await bench.clock.sleep(2000)
        assert bench.dispatcher.paths()[MINT] == 0
        assert watching.key == ""

    tell(tmp_path, story)


def test_old_credentials_stay_while_new_ones_cannot_be_had(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        await bench.until(lambda: bool(watching.works))
        bench.dispatcher.problems[MINT] = AWAY
        await bench.until(lambda: bench.dispatcher.paths()[MINT] > 5)
        assert watching.key == "key-1"
        refusal = Problem(type="token former attempt", title="It is over.", status=403)
        bench.dispatcher.problems[MINT] = refusal
        await bench.clock.sleep(100)
        assert (watching.key, bool(bench.runtime.running)) == ("key-1", True)
        del bench.dispatcher.problems[MINT]
        assert await bench.until(lambda: bench.dispatcher.minted == 2) < 31
        await bench.clock.sleep(0.1)
        assert watching.key == "key-2"
        # And then in time again.
        assert await bench.until(lambda: bench.dispatcher.minted == 3) > 590

    tell(tmp_path, story, mints=True)


def test_a_refusal_for_good_ends_the_task_with_its_sentence(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        title = "The policy of 40 prefixes has more than 2,048 characters."
        refusal = Problem(type="no credentials", title=title, status=409, detail="Compact it.")
        bench.dispatcher.problems[MINT] = refusal
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "dead")
        said = f"No credentials are minted for the task: {title} Compact it."
        assert bench.dispatcher.tasks[1].reason == said
        assert (watching.works, bench.dispatcher.paths()[MINT]) == ([], 1)

    tell(tmp_path, story, mints=True)


def test_who_mints_may_be_away_for_a_while(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        bench.dispatcher.problems[MINT] = AWAY
        await bench.until(lambda: bench.dispatcher.paths()[MINT] == 3)
        assert watching.works == []
        del bench.dispatcher.problems[MINT]
        await bench.until(lambda: bool(watching.works), seconds=10)
        assert watching.key == "key-1"

    tell(tmp_path, story, mints=True)


def test_who_mints_may_not_be_away_for_long(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        bench.dispatcher.problems[MINT] = AWAY
        took = await bench.until(lambda: bench.dispatcher.tasks[1].status == "failed")
        assert MINT_SECONDS_MAX <= took < MINT_SECONDS_MAX + 40
        assert "within 60 s" in bench.dispatcher.tasks[1].reason
        assert "STS is away" in bench.dispatcher.tasks[1].reason
        assert watching.works == []
        # It was alive all the time.
        assert bench.dispatcher.paths()[HEARTBEAT] >= 5

    tell(tmp_path, story, mints=True)


def test_a_task_that_waits_for_credentials_can_be_cancelled(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        bench.dispatcher.problems[MINT] = AWAY
        bench.dispatcher.tasks[1].cancel_asked = True
        took = await bench.until(lambda: bench.dispatcher.tasks[1].status == "cancelled")
        assert took < 15
        assert (watching.works, bench.dispatcher.tasks[1].reason) == ([], "It was cancelled.")

    tell(tmp_path, story, mints=True)


def test_a_disk_that_is_full_fails_the_attempt_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = _full_disk(monkeypatch)

    async def story(bench: Bench, watching: Watching) -> None:
        full.append(True)
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "failed")
        said = "What the task is handed cannot be written: No space left on device."
        assert bench.dispatcher.tasks[1].reason == said
        assert watching.works == []

    tell(tmp_path, story)


def test_a_disk_that_fills_up_later_costs_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = _full_disk(monkeypatch)

    async def story(bench: Bench, watching: Watching) -> None:
        await bench.until(lambda: bool(watching.works))
        full.append(True)
        await bench.clock.sleep(800)
        assert (watching.token, watching.key) == ("cap.1.1-0", "key-1")
        told = [each.message for each in caplog.records if "keeps its old" in each.message]
        assert len(told) == 2, "once of each"
        assert not any("secret-" in each or "cap." in each for each in told)
        full.clear()
        await bench.clock.sleep(40)
        assert watching.token == bench.dispatcher.tasks[1].tokens[-1]
        assert watching.key == f"key-{bench.dispatcher.minted}" != "key-1"

    tell(tmp_path, story, mints=True)


def _full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A disk that is full while there is something in the list."""
    full: list[bool] = []
    write = belongings.Belongings._write

    def writing(self: belongings.Belongings, file: Path, text: str) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write(self, file, text)

    monkeypatch.setattr(belongings.Belongings, "_write", writing)
    return full


def test_a_worker_that_stops_leaves_nothing(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        await bench.until(lambda: bool(watching.works))
        bench.worker.stop()
        bench.worker.stop()
        await bench.running[0]
        assert bench.dispatcher.tasks[1].reason == "The worker was stopped."

    tell(tmp_path, story, mints=True)


@pytest.mark.parametrize("said", [True, "yes", 1, None])
def test_untrusted_work_is_not_run_by_a_worker_that_cannot_keep_it_apart(said: object) -> None:
    definition = {"outputs": [], "untrusted": said}
    ran: list[Work] = []

    async def doing(work: Work, voice: Voice) -> tuple[Made, ...]:
        ran.append(work)
        return ()

    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "failed")
        assert bench.dispatcher.tasks[1].reason.startswith(
            "This worker cannot keep untrusted work apart. Set uids ="
        )
        assert ran == []

    checked: Doing = doing
    play(story, setting=waiting(1, definition=definition), doing=checked, seeds=range(2))


class BadlyEnded(belongings.Belongings):
    """Of work that has left what keeps its outputs from being published."""

    def end(self) -> None:
        super().end()
        raise WorkFailed("It has a link.")


@pytest.mark.parametrize("first", ["", "It is wrong.", "The worker was stopped."])
def test_a_bad_end_fails_the_attempt_unless_something_was_wrong_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr("penstock.worker.handing.Belongings", BadlyEnded)

    async def doing(work: Work, voice: Voice) -> tuple[Made, ...]:
        if first == "It is wrong.":
            raise WorkFailed(first)
        if first:
            await asyncio.Event().wait()
        return await nothing(work, voice)

    async def story(bench: Bench) -> None:
        if first == "The worker was stopped.":
            await bench.until(lambda: bool(bench.runtime.running))
            bench.worker.stop()
            bench.worker.stop()
            await bench.running[0]
        await bench.until(lambda: bool(bench.dispatcher.tasks[1].ended))
        assert bench.dispatcher.tasks[1].reason == (first or "It has a link.")

    checked: Doing = doing
    play(story, setting=waiting(1), doing=checked, handed=tmp_path / "handed", seeds=[1])
