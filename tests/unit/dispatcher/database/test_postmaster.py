"""The script between a leash and Postgres: what it starts ends with it, as any user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.dispatcher.database import postmaster

# Tells that it runs and how it was ended. A shell, because anybody may run it.
PROGRAM = "trap 'echo interrupted; exit 0' INT; echo ready; read line"
NOBODY = "65534:65534"


@pytest.mark.skipif(sys.platform != "linux", reason="only the kernel of Linux does this")
@pytest.mark.parametrize("owner", ["", NOBODY], ids=["ourselves", "another user"])
def test_the_program_is_interrupted_when_the_script_is_killed(owner: str) -> None:
    if owner and os.getuid() != 0:
        pytest.skip("only root may become another user")
    script = str(Path(postmaster.__file__))
    with subprocess.Popen(
        [sys.executable, "-I", script, owner, "/bin/sh", "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.kill()
        assert started.wait() == -signal.SIGKILL
        assert started.stdout.read() == "interrupted\n"
