"""The Postgres that integration tests share: one server a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.kernel.errors import PenstockError
from tests.conftest import RUN, SERVERS, Background
from tests.integration.dispatcher.world import Worlds


@pytest.fixture(scope="session")
def postgres(background: Background) -> Iterator[LocalPostgres]:
    """A real Postgres. Without one, tests are skipped on a laptop and fail in CI."""
    with tempfile.TemporaryDirectory(prefix="postgres-", dir=RUN) as folder:
        # Nothing here has to survive the machine.
        server = LocalPostgres(Path(folder), settings={"fsync": "off"}, grace_seconds=5)
        try:
            background.run(server.start())
        except PenstockError as error:
            background.run(server.stop())
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no Postgres: {error.message} {error.hint}")
        SERVERS.append(server.log)
        yield server
        background.run(server.stop())


@pytest.fixture(scope="session")
def worlds(postgres: LocalPostgres) -> Worlds:
    """Empty databases with the schema, one after the other."""
    return Worlds(postgres)
