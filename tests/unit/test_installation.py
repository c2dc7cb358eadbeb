"""An installation: who of it is stopped when, and what is said meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock import installation
from penstock.cli.up import _kept
from penstock.installation import Installation
from penstock.settings import Settings


def test_what_stopping_waits_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Keeping] = []
    said: list[str] = []

    class Keeping:
        def __init__(self, kept: Any, *, together: Any, waiting: Any, **_: Any) -> None:
            self.names, self.together, self.waiting = [name for name, _ in kept], together, waiting
            made.append(self)

        async def start(self) -> None: ...

        async def stop(self) -> None:
            self.waiting(["webhook", "worker"])
            self.waiting(["dispatcher"])

    monkeypatch.setattr(installation, "Keeper", Keeping)
    settings = Settings(
        data=tmp_path, port=0, internal_port=0, webhook_port=0, postgres="postgresql:///x"
    )

    async def main() -> None:
        async with Installation(settings, code=tmp_path, waiting=said.append):
            pass

    asyncio.run(main())
    (keeping,) = made
    # The dispatcher is there until all have told it what they had to tell.
    assert keeping.names == ["dispatcher", *keeping.together]
    assert said == [
        "Waiting for the webhook sources, and for the worker: what runs may take 30 s to end ...",
        "Waiting for the dispatcher ...",
    ]


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("", "everything in {data}"),
        ("file:///tmp/b", "datasets and queues in file:///tmp/b, the rest in {data}"),
        ("s3://bucket/p?region=x", "datasets and queues in s3://bucket/p, the rest in {data}"),
    ],
)
def test_it_is_said_where_everything_is(tmp_path: Path, store: str, words: str) -> None:
    made = Installation(Settings(data=tmp_path, store=store), code=tmp_path)
    assert _kept(made) == words.format(data=tmp_path)
