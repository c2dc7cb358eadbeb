"""Where a worker finds secrets, what it refuses, and what it says."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.errors import SecretUnavailable, WorkFailed
from penstock.testing.virtual import World, simulate
from penstock.worker.secrets import (
    LOOK_SECONDS_MAX,
    REMEMBER_SECONDS,
    VALUE_BYTES_MAX,
    SecretCache,
    SecretResolver,
)

VALUE = "hunter2-hunter2"
DOCUMENT = f'{{"user": "ann", "password": "{VALUE}", "port": 5432, "none": null}}'


class Shelf:
    """A vault in memory."""

    def __init__(self, **texts: str) -> None:
        self.texts = {name.replace("_", "/"): text for name, text in texts.items()}
        self.asked: list[str] = []

    async def text(self, name: str) -> str:
        self.asked.append(name)
        if name not in self.texts:
            raise SecretUnavailable(f"is not there: nowhere is {name}")
        return self.texts[name]


def resolver(
    folder: Path,
    *,
    prefix: str = "penstock/",
    vault: Shelf | None = None,
    environment: Mapping[str, str] | None = None,
) -> SecretResolver:
    said = {"KEY": VALUE, "EMPTY": "", "AWS_SECRET_ACCESS_KEY": VALUE, "BYTES": "a\udc80"}
    return SecretResolver(
        environment=said if environment is None else environment,
        folder=folder,
        prefix=prefix,
        vault=vault,
    )


def values(it: SecretResolver, **references: Any) -> Mapping[str, str]:
    return asyncio.run(it.values(references, job="clean"))


def failure(it: SecretResolver, **references: Any) -> tuple[str, bool]:
    with pytest.raises(WorkFailed) as caught:
        values(it, **references)
    assert VALUE not in str(caught.value)
    assert caught.value.__cause__ is None
    return caught.value.message, caught.value.is_retried


def test_each_is_found_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "api.key").write_text(f"{VALUE}\n")
    vault = Shelf(penstock_db=DOCUMENT)
    found = values(
        resolver(tmp_path, vault=vault),
        A="env:KEY",
        B="file:api.key",
        C="aws:penstock/db",
        D="aws:penstock/db#password",
        E="aws:penstock/db#port",
    )
    assert found == {"A": VALUE, "B": VALUE, "C": DOCUMENT, "D": VALUE, "E": "5432"}


def test_only_the_end_of_a_file_is_not_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b" line 1\r\n\nline 2 \r\n\n")
    assert values(resolver(tmp_path), A="file:a") == {"A": " line 1\r\n\nline 2 "}


def test_a_mounted_folder_of_links_is_read(tmp_path: Path) -> None:
    # As Kubernetes mounts secrets: the names are links to a folder that is replaced as a whole.
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "key").write_text(VALUE)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "key").symlink_to("..data/key")
    assert values(resolver(tmp_path), A="file:key") == {"A": VALUE}


@pytest.mark.parametrize(
    ("reference", "message", "is_retried"),
    [
        (
            "env:NONE",
            "is not there: this worker has no variable NONE in its environment; set it",
            True,
        ),
        ("env:EMPTY", "cannot be used: it is empty.", True),
        ("env:BYTES", "cannot be used: it is not UTF-8.", True),
        ("file:none", "is not there: this worker has no file FOLDER/none; put it there.", True),
        ("file:empty", "cannot be used: it is empty.", True),
        ("file:latin", "cannot be used: FOLDER/latin is not UTF-8.", True),
        ("file:folder", "cannot be read: FOLDER/folder: Is a directory.", True),
        ("file:pipe", "cannot be read: FOLDER/pipe is not a file.", True),
        ("file:circle", "cannot be read: FOLDER/circle:", True),
        ("file:wide", "cannot be used: it has more than 65,536 bytes.", False),
        ("file:large", "cannot be used: it has more than 65,536 bytes.", False),
        (
            "file:out",
            "is not allowed: FOLDER/out is a link that leads out of the folder of secrets.",
            False,
        ),
        (
            "aws:other/db",
            "is not allowed: of AWS Secrets Manager this worker gives jobs what begins with 'pens",
            False,
        ),
        ("aws:penstock/none", "is not there: nowhere is penstock/none.", True),
        ("aws:penstock/db#none", "is not there: what is kept has no field none.", True),
        ("aws:penstock/db#word", "is not there: what is kept has no field word.", True),
        (
            "aws:penstock/text#word",
            "is not there: what is kept is no JSON object with a field word.",
            True,
        ),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    tmp_path: Path, reference: str, message: str, is_retried: bool
) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "empty").write_text("\n")
    (folder / "latin").write_bytes(b"\xe4")
    (folder / "folder").mkdir()
    (folder / "large").write_text("x" * (VALUE_BYTES_MAX + 1))
    (folder / "wide").write_text("x" + "ä" * VALUE_BYTES_MAX)
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    (tmp_path / "worker.secret").write_text(VALUE)
    (folder / "out").symlink_to("../worker.secret")
    vault = Shelf(penstock_db=DOCUMENT, penstock_text=VALUE, other_db=DOCUMENT)
    said = failure(resolver(folder, vault=vault), TOKEN=reference)
    wanted = message.replace("FOLDER", str(folder))
    assert said[0].startswith(f"The secret TOKEN of job clean ({reference}) {wanted}")
    assert said[0].endswith(".")
    assert said[1] is is_retried
    assert "other/db" not in vault.asked


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (VALUE, "does not say where the secret is"),
        ("env:PENSTOCK_WORKER_SECRET", "those are the worker's own"),
        ("env:AWS_SECRET_ACCESS_KEY", "those are the worker's own"),
        ("file:../worker.secret", "names no file after file:"),
        ("aws:arn:aws:secretsmanager:x", "has an ARN after aws:"),
        ({"env": VALUE}, "is not a text"),
    ],
)
def test_the_worker_trusts_no_reference(tmp_path: Path, reference: object, words: str) -> None:
    said, is_retried = failure(resolver(tmp_path), TOKEN=reference)
    assert said.startswith("The secret 'TOKEN' of job clean ")
    assert words in said
    assert not is_retried


def test_neither_names_nor_numbers_are_trusted(tmp_path: Path) -> None:
    assert "cannot be the name of a secret" in failure(resolver(tmp_path), **{"a-b": "env:KEY"})[0]
    many = {f"K{number}": "env:KEY" for number in range(33)}
    assert failure(resolver(tmp_path), **many) == (
        "The job clean has 33 secrets; 32 are allowed.",
        False,
    )


def test_a_worker_without_a_vault_says_so(tmp_path: Path) -> None:
    said, is_retried = failure(resolver(tmp_path), TOKEN="aws:penstock/db")
    assert "this worker uses no AWS Secrets Manager" in said
    assert is_retried


def test_what_everybody_can_read_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    for name, mode in (("open", 0o644), ("closed", 0o600)):
        (tmp_path / name).write_text(VALUE)
        (tmp_path / name).chmod(mode)
    it = resolver(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            values(it, A="file:open", B="file:closed")
    assert [each.getMessage() for each in caplog.records] == [
        f"everybody on this machine can read a secret: chmod 600 {tmp_path / 'open'}"
    ]
    assert VALUE not in caplog.text


def test_a_vault_that_never_answers_is_waited_for_once(tmp_path: Path) -> None:
    class Silent:
        async def text(self, name: str) -> str:
            await asyncio.Event().wait()
            return name

    async def main(world: World) -> None:
        clock = world.clock()
        it = SecretResolver(environment={}, folder=tmp_path, prefix="", vault=Silent())
        began = clock.monotonic()
        with pytest.raises(WorkFailed, match=r"it was not found within 15 s\.") as caught:
            await it.values({"A": "aws:a", "B": "aws:b"}, job="clean")
        assert caught.value.is_retried
        assert clock.monotonic() - began == pytest.approx(LOOK_SECONDS_MAX, abs=0.1)

    simulate(main, seed=1)


# What is remembered.


class Counting:
    """Answers after a second, and counts how often it was asked."""

    def __init__(self, world: World) -> None:
        self.clock = world.clock()
        self.asked = 0
        self.is_away = False

    async def __call__(self, name: str) -> str:
        self.asked += 1
        number = self.asked
        await self.clock.sleep(1.0)
        if self.is_away:
            raise SecretUnavailable("cannot be had now: away")
        return f"{name} {number}"


def test_a_secret_is_asked_for_once_a_minute_however_many_want_it() -> None:
    async def main(world: World) -> None:
        ask = Counting(world)
        remembered = SecretCache(ask, clock=ask.clock)
        assert await asyncio.gather(*(remembered.text("a") for _ in range(10))) == ["a 1"] * 10
        await ask.clock.sleep(REMEMBER_SECONDS - 1)
        assert await remembered.text("a") == "a 1"
        assert await remembered.text("b") == "b 2"
        await ask.clock.sleep(2)
        assert vars(remembered)["_kept"].keys() == {"b"}
        assert await remembered.text("a") == "a 3"
        assert ask.asked == 3

    simulate(main, seed=1)


def test_a_failure_is_shared_and_not_remembered() -> None:
    async def main(world: World) -> None:
        ask = Counting(world)
        ask.is_away = True
        remembered = SecretCache(ask, clock=ask.clock)
        began = ask.clock.monotonic()
        found = await asyncio.gather(
            *(remembered.text("a") for _ in range(5)), return_exceptions=True
        )
        assert [type(each) for each in found] == [SecretUnavailable] * 5
        assert ask.clock.monotonic() - began == pytest.approx(1.0, abs=0.1)
        ask.is_away = False
        assert await remembered.text("a") == "a 2"

    simulate(main, seed=1)


def test_who_is_cancelled_takes_nothing_from_the_others() -> None:
    async def main(world: World) -> None:
        ask = Counting(world)
        remembered = SecretCache(ask, clock=ask.clock)
        first = world.loop.create_task(remembered.text("a"))
        await ask.clock.sleep(0.1)
        second = world.loop.create_task(remembered.text("a"))
        await ask.clock.sleep(0.1)
        first.cancel()
        assert await second == "a 1"
        assert first.cancelled()
        assert ask.asked == 1

    simulate(main, seed=1)
