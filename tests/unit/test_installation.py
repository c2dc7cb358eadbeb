"""An installation: who of it is stopped when, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
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

    monkeypatch.setattr(installation, "Supervisor", Keeping)
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
        "Waiting for the webhook sources, and for the worker: running tasks have 30 s ...",
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


@pytest.mark.parametrize(
    ("made", "without"),
    [
        ("make_worker", {"httpx", "cryptography", "uvicorn", "psycopg", "fastavro"}),
        ("make_webhook_source", {"httpx", "cryptography", "psycopg", "penstock.worker.worker"}),
        ("Installation", {"uvicorn", "penstock.worker.worker", "penstock.console"}),
    ],
)
def test_a_process_imports_what_it_is_made_of(tmp_path: Path, made: str, without: set[str]) -> None:
    # Most of the memory of an installation that idles is what its processes have imported.
    code = (
        "import pathlib, sys\n"
        "from penstock.settings import Settings\n"
        f"from penstock.{'installation' if made == 'Installation' else 'app'} import {made}\n"
        f"settings = Settings(data=pathlib.Path({str(tmp_path)!r}), worker_secret='s' * 40)\n"
        f"{made}(settings{', code=settings.data' if made == 'Installation' else ''})\n"
        f"assert not (found := {without!r} & set(sys.modules)), found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
