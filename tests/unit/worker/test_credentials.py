"""What a task is handed: there before it runs, renewed in place, gone when it has ended."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.protocol.problem import Problem
from penstock.protocol.work import InputAnswer, PartAnswer
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkReporter
from penstock.worker import sandbox
from penstock.worker.sandbox import MINT_SECONDS_MAX
from tests.unit.worker.bench import Bench, Doing, nothing, play
from tests.unit.worker.test_worker import HEARTBEAT, waiting

MINT = "/v1/task/credentials"
AWAY = Problem(type="unavailable", title="STS is away.", status=503)


class Watching:
    """Work that waits until it is let go, and looks at what it has."""

    def __init__(self) -> None:
        self.works: list[AttemptWork] = []
        self.free = asyncio.Event()

    async def __call__(
        self, work: AttemptWork, reporter: WorkReporter
    ) -> tuple[ProducedOutput, ...]:
        self.works.append(work)
        await self.free.wait()
        return await nothing(work, reporter)

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


def test_an_attempt_of_the_same_number_has_a_folder_of_its_own(tmp_path: Path) -> None:
    # As after a crash of Postgres that has forgotten a claim: decision 0076.
    works: list[AttemptWork] = []
    second = asyncio.Event()

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        works.append(work)
        if len(works) > 1:
            second.set()
            return await nothing(work, reporter)
        try:
            await asyncio.Event().wait()
        finally:
            # It takes its time to end, and the other begins.
            await second.wait()
        raise AssertionError

    async def story(bench: Bench) -> None:
        await bench.until(lambda: bool(works))
        task = bench.dispatcher.tasks[1]
        task.status, task.attempt = "queued", 0
        await bench.until(lambda: task.status == "completed")
        assert [each.attempt for each in works] == [1, 1]

    play(story, setting=waiting(1), doing=doing, handed=tmp_path / "handed", seeds=[1])


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


def test_a_refusal_fails_the_attempt_with_its_sentence_and_never_the_task(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        title = "This dispatcher has no role to issue credentials for."
        refusal = Problem(type="no credentials", title=title, status=409, detail="Set one.")
        bench.dispatcher.problems[MINT] = refusal
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "failed")
        said = f"No credentials are minted for the task: {title} Set one."
        assert bench.dispatcher.tasks[1].reason == said
        assert (watching.works, bench.dispatcher.paths()[MINT]) == ([], 1)

    tell(tmp_path, story, mints=True)


HOURS = [f"file:///data/datasets/raw/g/2020-01-05T{hour:02}/1-1-x" for hour in range(24)]


def of_hours() -> dict[str, InputAnswer]:
    parts = [PartAnswer(location=each, revision=1) for each in HOURS]
    return {"raw": InputAnswer(dataset="raw", uuid="u", generation="g", parts=parts)}


def asked(bench: Bench) -> list[tuple[list[str] | None, list[str] | None]]:
    return [(ask.read, ask.write) for path, ask in bench.dispatcher.calls if path == MINT]


def test_a_task_with_more_folders_than_fit_runs_and_has_them_some_at_a_time(
    tmp_path: Path,
) -> None:
    got: list[str] = []

    async def daily(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        assert work.handed is not None
        found = work.handed.credentials
        assert found is not None
        assert found.lacks == (
            "These credentials are not for 24 folders of the task, for a policy of STS has no room"
            " for all of them. Ask for some of them at a time: task.credentials_for(LOCATION, ...)."
        )
        quarters = [HOURS[first : first + 4] for first in range(0, len(HOURS), 4)]
        got.extend([(await reporter.credentials(each)).access_key for each in quarters])
        out = f"{work.outputs['out'].location}/deeper"
        got.append((await reporter.credentials([out, work.scratch])).access_key)
        with pytest.raises(WorkFailed, match="There are too many"):
            await reporter.credentials(HOURS)
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        dispatcher = bench.dispatcher
        dispatcher.folders_max = 5
        dispatcher.granted = {"read": [f"{each}/" for each in HOURS], "write": ["file:///data/"]}
        await bench.until(lambda: dispatcher.tasks[1].status == "completed")
        scratch = f"{bench.runtime.works[0].scratch}/"
        assert asked(bench)[:3] == [
            (None, None),
            ([scratch], None),
            ([f"{each}/" for each in HOURS[:4]], []),
        ]
        out = bench.runtime.works[0].outputs["out"].location
        assert asked(bench)[-2] == ([scratch], [f"{out}/deeper/", scratch])
        assert got == [f"key-{number}" for number in range(2, 9)]

    setting = waiting(1, mints=True, inputs=of_hours())
    play(story, setting=setting, doing=daily, handed=tmp_path / "handed", seeds=[1])


def test_what_fits_is_what_is_renewed(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        bench.dispatcher.folders_max = 2
        bench.dispatcher.granted = {"write": [f"file:///data/{each}/" for each in "abc"]}
        await bench.until(lambda: bool(watching.works))
        scratch = [f"{watching.works[0].scratch}/"]
        # Not even the outputs: the scratch folder alone.
        begun = [(None, None), (scratch, None), (scratch, scratch)]
        assert asked(bench) == begun
        await bench.until(lambda: bench.dispatcher.minted == 2)
        assert asked(bench) == [*begun, (scratch, scratch)]

    tell(tmp_path, story, mints=True, inputs=of_hours())


def test_what_the_token_does_not_grant_is_told_too(tmp_path: Path) -> None:
    async def story(bench: Bench, watching: Watching) -> None:
        bench.dispatcher.granted = {"read": [f"{HOURS[0]}/"], "write": ["file:///data/"]}
        await bench.until(lambda: bool(watching.works))
        handed = watching.works[0].handed
        assert handed is not None
        assert handed.lacks.startswith("These credentials are not for 23 folders of the task")
        assert "does not grant" in handed.lacks

    tell(tmp_path, story, mints=True, inputs=of_hours())


def test_work_that_asks_for_more_than_is_granted_is_told_so_at_once(tmp_path: Path) -> None:
    refusal = Problem(type="token not granted", title="It grants no such thing.", status=403)

    refused = asyncio.Event()

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        await refused.wait()
        with pytest.raises(WorkFailed, match="grants no such thing"):
            await reporter.credentials(["s3://elsewhere/x"])
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.dispatcher.minted == 1)
        bench.dispatcher.problems[MINT] = refusal
        refused.set()
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert bench.dispatcher.paths()[MINT] == 2

    setting = waiting(1, mints=True)
    play(story, setting=setting, doing=doing, handed=tmp_path / "handed", seeds=[1])


def test_one_call_of_an_attempt_mints_at_a_time(tmp_path: Path) -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        async with asyncio.TaskGroup() as group:
            for each in HOURS[:5]:
                group.create_task(reporter.credentials([each]))
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert (bench.dispatcher.minted, bench.dispatcher.most_in_calls[MINT]) == (6, 1)

    setting = waiting(1, mints=True)
    play(story, setting=setting, doing=doing, handed=tmp_path / "handed", seeds=[1])


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


def test_a_worker_whose_disk_is_full_leaves_the_task_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = _full_disk(monkeypatch)

    async def story(bench: Bench, watching: Watching) -> None:
        full.append(True)
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "released")
        said = "The files of the attempt cannot be written: No space left on device."
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
    write = sandbox.AttemptSandbox._write

    def writing(self: sandbox.AttemptSandbox, file: Path, text: str) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write(self, file, text)

    monkeypatch.setattr(sandbox.AttemptSandbox, "_write", writing)
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
    ran: list[AttemptWork] = []

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        ran.append(work)
        return ()

    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "released")
        assert bench.dispatcher.tasks[1].reason.startswith(
            "This worker cannot keep untrusted work apart. Set uids ="
        )
        assert ran == []

    checked: Doing = doing
    play(story, setting=waiting(1, definition=definition), doing=checked, seeds=range(2))


class BadlyEnded(sandbox.AttemptSandbox):
    """Of work that has left what keeps its outputs from being published."""

    def end(self) -> None:
        super().end()
        raise WorkFailed("It has a link.")


@pytest.mark.parametrize("first", ["", "It is wrong.", "The worker was stopped."])
def test_a_bad_end_fails_the_attempt_unless_something_was_wrong_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr("penstock.worker.sandbox.AttemptSandbox", BadlyEnded)

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        if first == "It is wrong.":
            raise WorkFailed(first)
        if first:
            await asyncio.Event().wait()
        return await nothing(work, reporter)

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
