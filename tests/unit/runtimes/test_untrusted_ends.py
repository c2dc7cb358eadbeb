"""How untrusted work begins and ends on a store of files, as a worker that is root runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes import uid_pool
from penstock.runtimes.base import WorkOutput
from penstock.runtimes.guard import Guard, kill_user
from tests.unit.runtimes import test_untrusted
from tests.unit.runtimes.test_untrusted import FIRST, Site, site

__all__ = ["site"]
pytestmark = test_untrusted.pytestmark


def test_the_guard_knows_of_a_user_until_nothing_of_it_runs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.module("def run(task): ...")
    done: list[str] = []

    def killed(number: int) -> bool:
        done.append("killed")
        return kill_user(number)

    def forgot(guard: Guard, group: int) -> None:
        done.append("forgot")
        forget(guard, group)

    forget = Guard.forget
    monkeypatch.setattr("penstock.runtimes.child_process.kill_user", killed)
    monkeypatch.setattr(Guard, "forget", forgot)
    site.run(site.work())
    assert done == ["killed", "forgot"]


def test_links_in_an_output_fail_the_attempt_and_in_scratch_do_not(site: Site) -> None:
    site.module(
        "import os\ndef run(task):\n    os.symlink('/etc/passwd', task.config['where'] + '/link')\n"
    )
    site.run(site.work(1, where=str(site.folder / "scratch" / "1")))
    assert (site.folder / "scratch" / "1").stat().st_mode & 0o777 == 0o700
    with pytest.raises(WorkFailed, match=r"The output of untrusted work has a link.*: 'link'"):
        site.run(site.work(2, where=str(site.folder / "store" / "2")))
    status = (site.folder / "store" / "2").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (0, 0o700)


def test_a_store_of_files_needs_a_word_of_the_operator(site: Site) -> None:
    site.module("def run(task): ...")
    site.process = site.made(untrusted_on_files=False)
    with pytest.raises(WorkFailed, match="no untrusted work on a file:// store") as caught:
        site.run(site.work())
    assert "untrusted_on_files = true" in caught.value.hint
    assert caught.value.is_retried, "another worker may"
    assert not (site.folder / "store").exists()
    assert not (site.folder / "users").exists(), "no user was taken"


def test_a_bucket_needs_none(site: Site) -> None:
    site.process = site.made(untrusted_on_files=False)
    bucket = {"out": WorkOutput(dataset="out", uuid="u", location="s3://lake/1")}
    work = replace(site.work(), outputs=bucket, scratch="s3://lake/scratch/1")
    belongings = site.belongings(work)
    belongings.prepare("the token")
    assert belongings.user == FIRST
    belongings.end()


def test_whoever_has_the_number_next_finds_no_token(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = site.work()
    belongings = site.belongings(work)
    belongings.prepare("the token")
    modes: list[int] = []
    unlock = uid_pool.LeasedUid.unlock

    def unlocked(user: uid_pool.LeasedUid) -> None:
        assert belongings.folder is not None
        modes.append(belongings.folder.stat().st_mode & 0o777)
        unlock(user)

    monkeypatch.setattr(uid_pool.LeasedUid, "unlock", unlocked)
    belongings.end()
    assert modes == [0o700]
