"""What Penstock writes can be read, and what it did not write is told apart."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.document_format import (
    WRITERS_MAX,
    Document,
    Stamped,
    decode,
    encode,
    took_effect,
)
from penstock.kernel.errors import NewerFormat, NotOurs, UnreadableObject
from tests.sizes import some


class Plan(Stamped, frozen=True):
    kind: ClassVar[str] = "plan"
    format: ClassVar[int] = 3

    name: str = ""
    number: int = 0
    share: float = 0.0
    parts: tuple[str, ...] = ()
    note: str | None = None


class Empty(Document, frozen=True):
    kind: ClassVar[str] = "empty"


class Other(Document, frozen=True):
    kind: ClassVar[str] = "other-kind"


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=some(200), deadline=None)
@given(
    plan=st.builds(
        Plan,
        name=_text,
        number=st.integers(-(2**63), 2**63 - 1),
        share=st.floats(allow_nan=False, allow_infinity=False),
        parts=st.lists(_text, max_size=4).map(tuple),
        note=st.none() | _text,
        writes=st.dictionaries(_text, _text, max_size=4),
    )
)
def test_round_trip(plan: Plan) -> None:
    body = encode(plan)
    assert decode(Plan, body, where="a") == plan
    assert list(decode(Plan, body, where="a").writes) == list(plan.writes)
    assert next(iter(json.loads(body).items())) == ("penstock", "plan/3")


def test_what_is_stored_is_plain_json() -> None:
    assert encode(Empty()) == b'{"penstock":"empty/1"}'
    assert decode(Empty, encode(Empty()), where="a") == Empty()
    assert json.loads(encode(Plan(name="a", number=2, note="x"))) == {
        "penstock": "plan/3",
        "name": "a",
        "number": 2,
        "share": 0.0,
        "parts": [],
        "note": "x",
        "writes": {},
    }


def test_an_older_format_is_read() -> None:
    assert decode(Plan, b'{"penstock":"plan/1","name":"a"}', where="a") == Plan(name="a")


def test_unknown_fields_are_ignored() -> None:
    body = b'{"penstock":"plan/3","future":{"a":[1,{"b":null}]},"name":"a"}'
    assert decode(Plan, body, where="a") == Plan(name="a")


@pytest.mark.parametrize(
    "body",
    [
        b'{"name":"a","penstock":"plan/3"}',
        b'{ "penstock": "plan/3", "name": "a" }',
        b' \n{"penstock":"plan/3","name":"a"}\n',
        json.dumps({"writes": {}, "name": "a", "penstock": "plan/2"}, indent=2).encode(),
        b'{"pen\\u0073tock":"pl\\u0061n/3","name":"a"}',
    ],
)
def test_other_tools_may_write_fields_in_any_order(body: bytes) -> None:
    assert decode(Plan, body, where="a") == Plan(name="a")


@pytest.mark.parametrize(
    "body",
    [
        b'{"penstock":"plan/4","name":"a"}',
        b'{"name":"a","penstock":"plan/4"}',
        b'{"penstock":"plan/999999999"}',
        b'{"penstock":"plan/4","name":7,"number":"not a number any more"}',
    ],
)
def test_a_newer_format_is_refused_with_the_next_step(body: bytes) -> None:
    with pytest.raises(NewerFormat, match=r"queues/a\.json has format \d+ of 'plan'; .* up to 3"):
        decode(Plan, body, where="queues/a.json")
    with pytest.raises(NewerFormat) as caught:
        decode(Plan, body, where="queues/a.json")
    assert "Upgrade" in caught.value.hint


def test_another_kind_is_refused() -> None:
    with pytest.raises(NotOurs, match="a/b is a 'other-kind' object where a 'plan' is expected"):
        decode(Plan, encode(Other()), where="a/b")
    with pytest.raises(NotOurs, match="is expected"):
        decode(Other, b'{"name":"a","penstock":"plan/9"}', where="a/b")


DEEP = b"[" * 100_000 + b"]" * 100_000

FOREIGN = [
    b"",
    b" ",
    b"null",
    b"1",
    b'"plan/3"',
    b"[]",
    b'["penstock","plan/3"]',
    b"{}",
    b'{"name":"a"}',
    b'{"penstock":null}',
    b'{"penstock":3}',
    b'{"penstock":"plan"}',
    b'{"penstock":"plan/"}',
    b'{"penstock":"/3"}',
    b'{"penstock":"plan/3/4"}',
    b'{"penstock":"plan/0"}',
    b'{"penstock":"plan/03"}',
    b'{"penstock":"plan/-3"}',
    b'{"penstock":"plan/+3"}',
    b'{"penstock":"plan/ 3"}',
    b'{"penstock":"plan/3 "}',
    b'{"penstock":"plan/1_0"}',
    b'{"penstock":"plan/3.0"}',
    b'{"penstock":"plan/1e0"}',
    '{"penstock":"plan/\N{ARABIC-INDIC DIGIT THREE}"}'.encode(),
    b'{"penstock":"PLAN/3"}',
    b'{"penstock":"plan/' + b"9" * 5000 + b'"}',
    b'{"penstock":"' + b"k" * 100_000 + b'/3"}',
    b'{"penstock":"\xff/3"}',
    b'{"x":' + DEEP + b',"penstock":"plan/3"}',
    b'\xef\xbb\xbf{"penstock":"plan/3"}',
    b'{"penstock":"plan/3"',
    b"PAR1\x15\x04\x15\x10",
    bytes(range(256)),
]

DAMAGED = [
    b'{"penstock":"plan/3",',
    b'{"penstock":"plan/3"}x',
    b'{"penstock":"plan/3"}{"penstock":"plan/3"}',
    b'{"penstock":"plan/3","name":7}',
    b'{"penstock":"plan/3","number":"7"}',
    b'{"penstock":"plan/3","number":1.5}',
    b'{"penstock":"plan/3","number":true}',
    b'{"penstock":"plan/3","number":NaN}',
    b'{"penstock":"plan/3","share":NaN}',
    b'{"penstock":"plan/3","share":Infinity}',
    b'{"penstock":"plan/3","share":1e999}',
    b'{"penstock":"plan/3","number":' + b"9" * 5000 + b"}",
    b'{"penstock":"plan/3","name":null}',
    b'{"penstock":"plan/3","name":"\xff"}',
    b'{"penstock":"plan/3","writes":{"\xff":"a"}}',
    b'{"penstock":"plan/3","writes":["a"]}',
    b'{"penstock":"plan/3","writes":{"a":1}}',
    b'{"penstock":"plan/3","future":' + DEEP + b"}",
    b'{"penstock":"plan/3","name":"cut off',
    encode(Plan(name="a" * 100))[:60],
]


@pytest.mark.parametrize("body", FOREIGN, ids=lambda body: repr(body[:30]))
def test_what_is_not_ours_is_refused(body: bytes) -> None:
    with pytest.raises(NotOurs, match=r"^a/b was not written by Penstock\.$") as caught:
        decode(Plan, body, where="a/b")
    assert "Move it" in caught.value.hint


@pytest.mark.parametrize("body", DAMAGED, ids=lambda body: repr(body[:45]))
def test_what_is_damaged_is_refused(body: bytes) -> None:
    with pytest.raises(NotOurs, match=r"^a/b is damaged: "):
        decode(Plan, body, where="a/b")


@pytest.mark.parametrize("body", [*FOREIGN, *DAMAGED], ids=lambda body: repr(body[:30]))
def test_what_cannot_be_read_tells_nothing_of_a_write(body: bytes) -> None:
    sent = encode(Plan().stamped(writer="me", write="1"))
    assert took_effect(sent=sent, found=body) is None
    assert took_effect(sent=body, found=sent) is None


@settings(max_examples=some(300), deadline=None)
@given(body=st.binary(max_size=60) | _text.map(lambda text: text.encode()))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for whole in (body, b'{"penstock":"plan/3","name":' + body):
        with suppress(UnreadableObject):
            assert isinstance(decode(Plan, whole, where="a"), Plan)
        took_effect(sent=whole, found=body)


@settings(max_examples=some(100), deadline=None)
@given(place=st.integers(0, 200), byte=st.integers(0, 255))
def test_one_wrong_byte_is_read_or_refused(place: int, byte: int) -> None:
    whole = bytearray(encode(Plan(name="name", parts=("a", "b")).stamped(writer="w", write="1")))
    whole[place % len(whole)] = byte
    with suppress(UnreadableObject):
        assert isinstance(decode(Plan, bytes(whole), where="a"), Plan)


def test_a_second_header_does_not_change_what_is_read() -> None:
    """JSON with a name twice is nobody's: it is read as one of the two, and nothing breaks."""
    body = b'{"penstock":"plan/3","penstock":"other-kind/1","name":"a"}'
    assert decode(Plan, body, where="a") == Plan(name="a")


def test_stamping_keeps_the_rest_and_moves_the_writer_to_the_end() -> None:
    plan = Plan(name="a", writes={"one": "1", "two": "2"})
    stamped = plan.stamped(writer="one", write="3")
    assert stamped == Plan(name="a", writes={"two": "2", "one": "3"})
    assert list(stamped.writes) == ["two", "one"]
    assert plan.writes == {"one": "1", "two": "2"}


def test_the_last_32_writers_are_remembered() -> None:
    plan = Plan()
    for number in range(100):
        plan = plan.stamped(writer=f"writer {number}", write=str(number))
        assert len(plan.writes) == min(number + 1, 32)
    assert plan.writes == {f"writer {number}": str(number) for number in range(68, 100)}
    again = plan.stamped(writer="writer 68", write="again")
    assert len(again.writes) == 32, "a writer that is known pushes nobody out"
    assert "writer 69" in again.writes


def _body(writes: dict[str, str], *, name: str = "") -> bytes:
    return encode(Plan(name=name, writes=writes))


_full = {f"writer {number}": "x" for number in range(WRITERS_MAX)}
_nearly_full = dict(list(_full.items())[1:])


@pytest.mark.parametrize(
    ("sent", "found", "took"),
    [
        pytest.param(b"one", b"one", True, id="the same bytes"),
        pytest.param(b"one", b"two", None, id="bytes that say nothing"),
        pytest.param(_body({"me": "1"}), _body({"me": "1"}), True, id="ours"),
        pytest.param(_body({"me": "1"}), _body({"me": "1", "you": "2"}), True, id="replaced"),
        pytest.param(_body({"me": "1"}), _body({"me": "0", "you": "2"}), False, id="older of ours"),
        pytest.param(_body({"me": "1"}), _body({"you": "2"}), False, id="without us"),
        pytest.param(_body({"me": "1"}), b"two", None, id="replaced by something else"),
        pytest.param(b"one", _body({"you": "2"}), None, id="sent without a stamp"),
        pytest.param(_body({"me": "1"}), _body({}), None, id="replaced without a stamp"),
        pytest.param(_body({}), _body({"you": "2"}), None, id="sent with an empty stamp"),
        pytest.param(_body({"me": "1"}), _body(_full), None, id="perhaps forgotten"),
        pytest.param(_body({"me": "1"}), _body(_nearly_full), False, id="not yet forgotten"),
        pytest.param(_body({"me": "1"}), _body({**_nearly_full, "me": "1"}), True, id="in a crowd"),
        pytest.param(_body({"me": "1"}), _body({**_nearly_full, "me": "0"}), False, id="full"),
        pytest.param(
            _body({"you": "2", "me": "1"}), _body({"you": "2"}), False, id="the last is ours"
        ),
        pytest.param(
            _body({"me": "1"}, name="a"), _body({"me": "1"}, name="b"), True, id="changed since"
        ),
        pytest.param(
            _body({"me": "1"}),
            b'{"writes":{"me":"1"},"x":7,"penstock":"plan/9"}',
            True,
            id="changed by a later release",
        ),
        pytest.param(
            _body({"me": "1"}), b'{"writes":{"me":"1"}}', None, id="a stamp without our header"
        ),
    ],
)
def test_took_effect(sent: bytes, found: bytes, took: bool | None) -> None:
    assert took_effect(sent=sent, found=found) is took


def test_a_document_remembers_the_writes_of_a_writer() -> None:
    plan = Plan(writes={"me": "2", "you": "9"})
    assert plan.remembers(writer="me", writes={"1", "2"}) is True
    assert plan.remembers(writer="me", writes={"1", "9"}) is False
    assert plan.remembers(writer="other", writes={"1"}) is False
    assert Plan(writes=_full).remembers(writer="me", writes={"1"}) is None
    assert Plan(writes=_full).remembers(writer="writer 3", writes={"1"}) is False


_CROWD = """
import gc, sys, threading
from dataclasses import dataclass
from typing import ClassVar
from penstock.kernel import document_format as wire

sys.setswitchinterval(1e-6)
gc.set_threshold(20, 2, 2)
for number in range(150):
    @dataclass(frozen=True, slots=True)
    class Column:
        name: "str"
        is_nullable: "bool" = True

    class Crowded(wire.Document, frozen=True, kw_only=True):
        kind: ClassVar[str] = "crowded"
        columns: tuple[Column, ...] = ()
        others: dict[str, tuple[Column, ...]] = {}

    body = wire.encode(Crowded(columns=(Column("a"),)))
    barrier = threading.Barrier(6)

    def read():
        barrier.wait(10)
        assert wire.decode(Crowded, body, where="x").columns[0].name == "a"

    threads = [threading.Thread(target=read) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""


def test_threads_may_meet_a_kind_at_the_same_moment() -> None:
    """What msgspec does not stand by itself: it is the process that would end."""
    done = subprocess.run(
        [sys.executable, "-c", _CROWD], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
