"""Sessions: who is let in, and what a cookie or a form has to be."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.sessions import SESSION_SECONDS, ConsoleRole, ConsoleSession, ConsoleSessions
from penstock.kernel.entropy import seeded_entropy


class _Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps here")


class _Ended:
    """Forgets by the clock of its own, as a database does."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    async def end(self, number: str, *, seconds: float) -> None:
        self._until[number] = self._clock.now + seconds

    async def among(self, numbers: Collection[str]) -> Collection[str]:
        return {each for each in numbers if self._until.get(each, 0.0) > self._clock.now}


def _sessions(
    secret: str = "a secret of some length",
    *,
    api_token: str = "operators",
    viewer_token: str = "viewers",
    clock: _Clock | None = None,
    ended: _Ended | None = None,
) -> ConsoleSessions:
    clock = clock or _Clock()
    return ConsoleSessions(
        secret,
        clock=clock,
        entropy=seeded_entropy(1),
        ended=ended or _Ended(clock),
        api_token=api_token,
        viewer_token=viewer_token,
    )


@pytest.mark.parametrize(
    ("token", "role"),
    [
        ("operators", ConsoleRole.OPERATOR),
        ("viewers", ConsoleRole.VIEWER),
        ("", None),
        ("operator", None),
        ("operators ", None),
        ("ópera", None),
        ("\ud800", None),
    ],
)
def test_a_token_lets_in_whom_it_is_for(token: str, role: ConsoleRole | None) -> None:
    assert _sessions().role_of(token) is role


def test_without_tokens_nobody_signs_in_and_nobody_has_to() -> None:
    sessions = _sessions(api_token="", viewer_token="")
    assert sessions.is_open
    assert sessions.role_of("") is None
    assert not _sessions().is_open


def test_a_session_is_read_as_it_was_written_by_every_dispatcher_of_the_installation() -> None:
    session = _sessions().begin(ConsoleRole.VIEWER)
    cookie = _sessions().written(session)
    assert _sessions().read(cookie) == session
    assert not session.may_steer


def test_a_session_of_another_installation_or_token_is_none() -> None:
    cookie = _sessions().written(_sessions().begin(ConsoleRole.OPERATOR))
    assert _sessions("another secret, as long").read(cookie) is None
    assert _sessions(api_token="new").read(cookie) is None
    assert _sessions(viewer_token="new").read(cookie) is None


def test_a_session_ends() -> None:
    clock = _Clock()
    sessions = _sessions(clock=clock)
    cookie = sessions.written(sessions.begin(ConsoleRole.OPERATOR))
    clock.now += SESSION_SECONDS - 1
    assert sessions.read(cookie) is not None
    clock.now += 2
    assert sessions.read(cookie) is None
    clock.now -= 2 * SESSION_SECONDS
    assert sessions.read(cookie) is None


def test_who_signs_out_is_out_for_as_long_as_the_cookie_would_be_good_anywhere() -> None:
    clock, late = _Clock(), _Clock()
    ended = _Ended(clock)
    here, there = _sessions(clock=clock, ended=ended), _sessions(clock=late, ended=ended)
    one, other = here.begin(ConsoleRole.OPERATOR), here.begin(ConsoleRole.OPERATOR)
    assert asyncio.run(there.over([one, other])) == []
    asyncio.run(here.end(one))
    for hours in range(20):
        # A dispatcher whose clock is eight hours late would take the cookie for twenty.
        clock.now, late.now = 1_000_000.0 + hours * 3600, 1_000_000.0 + max(0, hours - 8) * 3600
        assert there.read(here.written(one)) is not None
        assert asyncio.run(there.over([one, other])) == [one]
    clock.now = 1_000_000.0 + SESSION_SECONDS + 1
    assert asyncio.run(here.over([one, other])) == [one, other]


def test_where_nobody_signs_in_nobody_is_asked_about() -> None:
    clock = _Clock()
    sessions = _sessions(api_token="", viewer_token="", clock=clock)
    session = sessions.begin(ConsoleRole.OPERATOR)
    asyncio.run(sessions.end(session))
    assert asyncio.run(sessions.over([session])) == ()


@given(st.text(max_size=80))
def test_no_text_is_a_session(text: str) -> None:
    assert _sessions().read(text) is None


@given(st.integers(0, 200), st.characters())
def test_a_changed_cookie_is_no_session(place: int, character: str) -> None:
    sessions = _sessions()
    cookie = sessions.written(sessions.begin(ConsoleRole.VIEWER))
    place %= len(cookie)
    changed = cookie[:place] + character + cookie[place + 1 :]
    assert sessions.read(changed) is None or changed == cookie


def test_the_token_of_a_form_is_no_session_and_of_its_session_alone() -> None:
    sessions = _sessions()
    one, other = sessions.begin(ConsoleRole.OPERATOR), sessions.begin(ConsoleRole.OPERATOR)
    token = sessions.form_token(one)
    assert sessions.is_from_here(one, token)
    assert not sessions.is_from_here(other, token)
    assert not sessions.is_from_here(one, "")
    assert sessions.read(f"{one.number}.{token}") is None
    viewer = ConsoleSession(ConsoleRole.VIEWER, one.began_at, one.number)
    assert sessions.written(viewer) != sessions.written(one)
