"""A child that is spoken to: bounds of messages, how it ends, and whom signals may reach then."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.kernel.framed_child import FrameCodec, FramedChild, StartedProcess
from penstock.kernel.frames import FrameDecoder, framed

ECHO = """
import sys
from penstock.kernel.frames import bodies, framed, parent_connection
connection = parent_connection()
for body in bodies(connection):
    if body == b"leave":
        sys.exit(3)
    connection.sendall(framed(body * 2))
"""


def _text(body: bytes) -> str:
    return body.decode()


CODEC = FrameCodec(framed, _text, 1000, ChildProcessError)


async def _child() -> FramedChild[str]:
    process, connection = StartedProcess.start((sys.executable, "-c", ECHO), environment=None)
    child = FramedChild(process, CODEC)
    await child.open(connection)
    return child


def test_messages_come_whole_however_their_bytes_arrive() -> None:
    unframing = FrameDecoder(bytes_max=5)
    found = []
    for each in framed(b"") + framed(b"hello") + framed(b"you"):
        unframing.feed(bytes([each]))
        if (body := unframing.body()) is not None:
            found.append(body)
    assert found == [b"", b"hello", b"you"]
    unframing.feed(framed(b"longer"))
    with pytest.raises(InvalidInput, match="6 bytes"):
        unframing.body()
    with pytest.raises(InvalidInput, match="too large"):
        framed(b"longer", bytes_max=5)


def test_after_its_end_no_signal_reaches_whoever_has_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        child = await _child()
        await child.say(b"twice")
        assert await child.hear() == "twicetwice"
        await child.say(b"leave")
        assert await child.hear() is None
        assert "exit code 3" in await child.why_ended("It")
        sent: list[int] = []
        monkeypatch.setattr(os, "killpg", lambda group, _: sent.append(group))
        child.kill()
        child.send_signal(signal.SIGTERM)
        assert not sent
        await child.destroy()

    asyncio.run(main())


@pytest.mark.parametrize("said", [b"x" * 501, b"\xff"])
def test_one_that_says_what_is_no_message_is_killed(said: bytes) -> None:
    async def main() -> None:
        child = await _child()
        # Too long when it comes back twice, or no text.
        await child.say(said)
        with pytest.raises(ChildProcessError, match="invalid message"):
            await child.hear()
        assert "killed by SIGKILL" in await child.why_ended("It")
        await child.destroy()

    asyncio.run(main())
