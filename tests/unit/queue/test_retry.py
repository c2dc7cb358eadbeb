"""What follows when an attempt fails: decided by the class of the error, paused within bounds."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import DoNotRetry, InvalidInput, Reschedule
from penstock.queue.attempt_outcomes import (
    MESSAGE_CHARACTERS_MAX,
    TRACE_CHARACTERS_MAX,
    Failed,
    Retried,
)
from penstock.queue.execution.retry import Raised, Retry, failed, raised, timed_out
from penstock.queue.ledger import LedgerFailure

FLAT = Retry(jitter=0)
ENTROPY = seeded_entropy(1)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Fatal(Exception):
    """Its text says the contrary of its class."""

    def __str__(self) -> str:
        return "TimeoutError: temporary, please retry"


# What is retried


def test_retry_is_not_decided_by_the_text_of_the_exception() -> None:
    retry = Retry(on=(OSError,))
    assert not retry.retries(Fatal())
    assert not retry.retries(ValueError("OSError: connection reset, retry"))
    assert retry.retries(OSError("fatal, do not retry"))
    assert retry.retries(OSError())


@pytest.mark.parametrize("on", [(Exception,), (OSError,), (TimeoutError,), TimeoutError, IOError])
def test_timeout_error_does_not_fail_on_the_first_attempt(on: Any) -> None:
    retry = Retry(on=on)
    assert retry.retries(TimeoutError())
    assert retry.retries(TimeoutError("fatal"))
    assert timed_out(retry, seconds=3, trace="").is_retried


def test_an_enforced_timeout_is_decided_by_its_class_as_well() -> None:
    retry = Retry(on=(ValueError,))
    assert not retry.retries(TimeoutError())
    found = timed_out(retry, seconds=0.5, trace="there")
    assert found == Raised(
        LedgerFailure("TimeoutError", "The handler did not end within 0.5 s.", "there"),
        is_retried=False,
    )


def test_subclasses_are_retried_and_others_are_not() -> None:
    retry = Retry(on=(OSError, LookupError))
    assert retry.retries(ConnectionResetError())
    assert retry.retries(KeyError("k"))
    assert not retry.retries(ValueError())
    assert not Retry(on=()).retries(Exception())


def test_what_is_never_retried_is_not_whatever_is_retried() -> None:
    retry = Retry(on=(OSError,), never=FileNotFoundError)
    assert retry.retries(PermissionError())
    assert not retry.retries(FileNotFoundError())
    assert not retry.retries(ExceptionGroup("", [PermissionError(), FileNotFoundError()]))
    assert not Retry().retries(ExceptionGroup("", [OSError(), DoNotRetry()]))
    assert not Retry(on=(BaseException,)).retries(DoNotRetry("ever"))
    assert Retry(never=(KeyError, OSError)).retries(ValueError())
    with pytest.raises(InvalidInput, match="not a class of exceptions"):
        Retry(never=("KeyError",))  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, True])
def test_a_task_is_rescheduled_within_a_year(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="cannot be rescheduled"):
        Reschedule(seconds)
    assert str(Reschedule(5)) == "again in 5 s"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_is_no_exception_is_retried_only_if_asked_for(kind: type[BaseException]) -> None:
    assert not Retry().retries(kind())
    assert Retry(on=kind).retries(kind())


def test_a_group_is_retried_if_each_error_in_it_is() -> None:
    retry = Retry(on=(OSError,))
    assert retry.retries(ExceptionGroup("g", [OSError(), ExceptionGroup("h", [TimeoutError()])]))
    assert not retry.retries(ExceptionGroup("g", [OSError(), ValueError()]))
    assert not retry.retries(BaseExceptionGroup("g", [SystemExit()]))
    assert Retry(on=ExceptionGroup).retries(ExceptionGroup("g", [ValueError()]))


# Pauses


def test_pauses_grow_by_the_backoff_up_to_the_longest() -> None:
    retry = Retry(attempts=9, first_seconds=2, backoff=3, max_seconds=50, jitter=0)
    assert [retry.pause_seconds(n, ENTROPY) for n in range(1, 6)] == [2, 6, 18, 50, 50]


def test_a_huge_attempt_number_does_not_overflow() -> None:
    assert FLAT.pause_seconds(1_000_000, ENTROPY) == FLAT.max_seconds
    whole: Any = 10
    assert Retry(backoff=whole, jitter=0).pause_seconds(1_000_000, ENTROPY) == 3600
    assert Retry(first_seconds=0, jitter=0).pause_seconds(1_000_000, ENTROPY) == 0


def test_tasks_that_failed_together_do_not_come_back_together() -> None:
    retry = Retry(first_seconds=100, jitter=0.25)
    pauses = [retry.pause_seconds(1, ENTROPY) for _ in range(200)]
    assert 75 <= min(pauses) < 80
    assert 120 < max(pauses) <= 125
    longest = [Retry().pause_seconds(99, ENTROPY) for _ in range(200)]
    assert len(set(longest)) == 200


@st.composite
def retries(draw: st.DrawFn) -> Retry:
    first = draw(st.floats(0, 1000))
    return Retry(
        backoff=draw(st.floats(1, 1000)),
        first_seconds=first,
        max_seconds=first + draw(st.floats(0, 1e6)),
        jitter=draw(st.floats(0, 1)),
    )


@given(retry=retries(), number=st.integers(1, 5000), seed=st.integers())
def test_no_pause_is_too_short_or_over_the_longest(retry: Retry, number: int, seed: int) -> None:
    pause = retry.pause_seconds(number, seeded_entropy(seed))
    assert retry.first_seconds * (1 - retry.jitter) <= pause <= retry.max_seconds


# How an attempt ends


def _failed(counted: int, *, retry: Retry = FLAT, is_retried: bool = True) -> Failed | Retried:
    found = Raised(LedgerFailure("ValueError", "no"), is_retried)
    return failed(found, retry, counted=counted, now_ms=1000, entropy=ENTROPY)


def test_the_last_attempt_fails_for_good() -> None:
    failure = LedgerFailure("ValueError", "no")
    assert _failed(1) == Retried(failure, 2000)
    assert _failed(2) == Retried(failure, 3000)
    assert _failed(3) == Failed(failure)
    assert _failed(4) == Failed(failure)
    assert _failed(1, retry=Retry(attempts=1)) == Failed(failure)


def test_an_error_that_is_not_retried_fails_on_its_first_attempt() -> None:
    assert _failed(1, is_retried=False) == Failed(LedgerFailure("ValueError", "no"))


def test_a_retry_is_never_due_early_by_rounding() -> None:
    retry = Retry(first_seconds=0.0001, jitter=0)
    assert _failed(1, retry=retry) == Retried(LedgerFailure("ValueError", "no"), 1001)


# What is told of an error


def _fail(error: Exception) -> None:
    raise error


def _caught(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        _fail(error)
    return caught.value


def test_an_error_is_told_with_its_class_its_text_and_where_it_came_from() -> None:
    found = raised(_caught(KeyError("colour")), Retry(), ours="another.py")
    assert (found.failure.error, found.failure.message) == ("KeyError", "'colour'")
    assert "in _fail\n    raise error\n" in found.failure.trace
    assert found.failure.trace.endswith("KeyError: 'colour'\n")
    assert found.is_retried


def test_frames_of_our_own_are_not_shown() -> None:
    found = raised(_caught(KeyError("colour")), Retry(), ours=__file__)
    assert found.failure.trace == "KeyError: 'colour'\n"


def test_an_error_that_cannot_tell_its_text_is_told_all_the_same() -> None:
    found = raised(_caught(Unspeakable()), Retry(), ours="")
    assert found.failure.error == "Unspeakable"
    assert "failed" in found.failure.message


def test_long_texts_are_cut_and_the_end_of_a_trace_is_kept() -> None:
    error = _caught(ValueError("x" * 10_000))
    error.add_note("the very end")
    found = raised(error, Retry(), ours="")
    assert len(found.failure.message) == MESSAGE_CHARACTERS_MAX
    assert len(found.failure.trace) == TRACE_CHARACTERS_MAX
    assert found.failure.trace.endswith("the very end\n")


def test_texts_that_cannot_be_encoded_are_told_as_far_as_they_can_be() -> None:
    error = _caught(ValueError("no such file: ü" + os.fsdecode(b"\xff")))
    found = raised(error, Retry(), ours="")
    assert found.failure.message == "no such file: ü?"
    assert found.failure.trace.endswith("ValueError: no such file: ü?\n")
    late = timed_out(Retry(), seconds=1, trace=os.fsdecode(b"\xff.py"))
    for each in (found, late):
        assert (
            msgspec.json.decode(msgspec.json.encode(each.failure), type=LedgerFailure)
            == each.failure
        )


# Bad input


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"attempts": -1},
        {"attempts": 1.5},
        {"attempts": True},
        {"attempts": "3"},
        {"backoff": 0.5},
        {"backoff": math.nan},
        {"backoff": math.inf},
        {"backoff": True},
        {"backoff": "2"},
        {"first_seconds": -1},
        {"first_seconds": math.nan},
        {"first_seconds": math.inf, "max_seconds": math.inf},
        {"first_seconds": 10, "max_seconds": 5},
        {"max_seconds": math.inf},
        {"max_seconds": None},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": math.nan},
        {"on": "OSError"},
        {"on": ("OSError",)},
        {"on": [OSError]},
        {"on": (OSError, int)},
        {"on": (OSError("an instance"),)},
        {"on": ((OSError,),)},
        {"on": None},
    ],
    ids=repr,
)
def test_a_rule_that_cannot_be_right_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"^Retry .*\.$"):
        Retry(**wrong)


def test_rules_at_the_edges_are_taken() -> None:
    Retry(attempts=1, backoff=1, first_seconds=0, max_seconds=0, jitter=1, on=())
    assert Retry() == Retry(
        attempts=3, backoff=2.0, on=(Exception,), first_seconds=1.0, max_seconds=3600.0, jitter=0.25
    )
