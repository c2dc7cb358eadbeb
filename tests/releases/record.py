"""Writes down what this release says and stores: `python -m tests.releases.record VERSION`.

Run once, when a release is made, and commit the folder that it makes.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.dispatcher.database.local_server import LocalPostgres
from tests.conftest import Background
from tests.integration.dispatcher.api.stage import staged
from tests.integration.dispatcher.world import Worlds
from tests.releases.bucket import filled
from tests.releases.conversation import ROOT, Mint, spoken
from tests.releases.recorded import FOLDER, Exchange, keep_exchanges, keep_stored


def _wire() -> Sequence[Exchange]:
    background = Background()
    with tempfile.TemporaryDirectory(prefix="penstock-postgres-") as folder:
        postgres = LocalPostgres(Path(folder), settings={"fsync": "off"})
        try:
            background.run(postgres.start())
            return asyncio.run(_spoken(Worlds(postgres)))
        finally:
            background.run(postgres.stop())
            background.close()


async def _spoken(worlds: Worlds) -> Sequence[Exchange]:
    async with worlds.world() as world, staged(world, root=ROOT, minter=Mint()) as stage:
        return await spoken(stage)


def main() -> None:
    (release,) = sys.argv[1:] or ("",)
    if not re.fullmatch(r"\d+\.\d+\.\d+", release):
        raise SystemExit("Say which release this is: python -m tests.releases.record 0.2.0")
    if (FOLDER / release).exists():
        raise SystemExit(f"{release} was recorded already; what a release said never changes.")
    said, objects = _wire(), filled()
    keep_exchanges(release, said)
    keep_stored(release, objects)


if __name__ == "__main__":
    main()
