"""The installed `penstock` command, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PENSTOCK = Path(sys.executable).parent / "penstock"


def penstock(
    *words: str, environment: Mapping[str, str] | None = None, seconds: float = 110
) -> subprocess.CompletedProcess[str]:
    """Run one command line to its end."""
    return subprocess.run(
        [PENSTOCK, *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, **(environment or {})},
        check=False,
    )
