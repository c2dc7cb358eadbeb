"""Dying with one's parent, by the kernel of Linux; elsewhere quietly not.

A child that watches a pipe to its parent can only act while it gets to run. The kernel can do
better: it sends the child a signal when the *thread* that made it has ended. So children are made
by a thread that lives as long as they should, mostly the main one. The wish survives `exec`, and
is lost when the process changes its user or makes a child of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
# Opened at import, so that `die_with` does nothing but one call: it is used between fork and exec.
_LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have this process get a signal when its parent, a process id, ends; now if it has ended."""
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:
        # It ended before the kernel knew of our wish.
        os.kill(os.getpid(), by)
