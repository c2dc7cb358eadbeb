"""The command line in this process, as at a terminal or in a pipe."""

from __future__ import annotations

import io
import os
import re
import signal
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from penstock import Client
from penstock.cli import dispatcher_call, run
from penstock.kernel.clock import Clock
from tests.unit.dispatcher.client.scripted import NOW, Scripted

COLUMNS = 80
_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Typed:
    """What came of a command line."""

    code: int
    out: str
    errors: str

    @property
    def lines(self) -> list[str]:
        """What is seen, without colours."""
        return _CODES.sub("", self.out).splitlines()


class Screen(io.StringIO):
    """What is written to a terminal, where somebody types Ctrl-C when they have read `until`."""

    def __init__(self, until: str = "") -> None:
        super().__init__()
        self._until = until

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        count = super().write(text)
        if self._until and self._until in self.getvalue():
            self._until = ""
            signal.raise_signal(signal.SIGINT)
        return count


class Hurried:
    """A clock on which nobody waits for real."""

    def __init__(self) -> None:
        self._slept = 0.0

    def monotonic(self) -> float:
        return self._slept

    def wall(self) -> float:
        return NOW.timestamp() + self._slept

    async def sleep(self, seconds: float) -> None:
        self._slept += seconds


def typed(
    *words: str,
    dispatcher: Scripted | None = None,
    is_terminal: bool = True,
    until: str = "",
    clock: Clock,
) -> Typed:
    """Run a command line, until something is read there; a dispatcher that is asked is this one."""
    out = Screen() if is_terminal else io.StringIO()
    errors = Screen(until) if is_terminal else io.StringIO()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}

    def connected(url: str, token: str | None) -> Client:
        assert dispatcher is not None, "this verb asks a dispatcher"
        return Client(url, token, transport=dispatcher.transport, clock=clock)

    with (
        mock.patch.dict(os.environ, {**kept, "COLUMNS": str(COLUMNS)}, clear=True),
        mock.patch.object(dispatcher_call, "connected", connected),
        redirect_stdout(out),
        redirect_stderr(errors),
    ):
        code = run(list(words))
    return Typed(code, out.getvalue(), errors.getvalue())
