"""At a terminal of eighty columns no line of a list is broken, however long what it lists is.

The dispatcher here answers every question with the longest that its types allow, within reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from datetime import timedelta
from typing import Any

import click
import msgspec
import pytest
from msgspec import inspect

from penstock import Queue
from penstock.cli import cli
from penstock.cli.output import table
from penstock.dispatcher.api.endpoints import pattern_of
from penstock.dispatcher.api.routes import PUBLIC
from tests.unit.cli.terminal import COLUMNS, Hurried, Screen, Typed, typed
from tests.unit.dispatcher.client.scripted import NOW, Scripted

_AT_A_DISPATCHER = (
    "status",
    "dag list",
    "task list",
    "dataset list",
    "dataset partitions sales",
    "backfill list",
    "pressure",
    "operator list",
    "outbox list",
    "rejected list",
    "rejected list alerts",
    "token list",
    "keys list",
    "alerts --all",
    "audit",
)
_AT_A_QUEUE = (
    "queue list",
    "queue stats",
    "queue batch",
    "queue schedule list",
    "queue limits list",
    "queue archive list",
)
_TYPE = "a-type-of-a-good-thirty-letters"
_LONG = f"{_TYPE}-{_TYPE}"


class _Longwinded(Scripted):
    """Says as much as it may, whatever it is asked."""

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        while (await receive()).get("more_body"):
            pass
        (answer,) = [
            each.answer
            for each in PUBLIC
            if each.method == scope["method"] and pattern_of(each.path).fullmatch(scope["path"])
        ]
        assert answer is not None
        headers = [(b"content-type", b"application/json"), (b"date", _DATE)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = msgspec.json.encode(_long(inspect.type_info(answer)))
        await send({"type": "http.response.body", "body": body})


_DATE = b"Tue, 01 Jan 2030 00:00:00 GMT"


_LONG_VALUES: Mapping[type[inspect.Type], Any] = {
    inspect.BoolType: True,
    inspect.IntType: 12_345_678,
    inspect.FloatType: 98_765.4,
    inspect.DateTimeType: NOW - timedelta(hours=65),
}


def _long(kind: inspect.Type, name: str = "") -> Any:
    """Something long of a type."""
    match kind:
        case inspect.Metadata():
            return _long(kind.type, name)
        case inspect.UnionType():
            known = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            return _long(known[0], name)
        case inspect.StrType():
            return f"{name} {'of many words ' * 12}"[: min(kind.max_length or 150, 150)].strip()
        case inspect.EnumType():
            return max((str(each.value) for each in kind.cls), key=len)
        case inspect.ListType() | inspect.CollectionType():
            return [_long(kind.item_type, name)] * 2
        case inspect.DictType():
            return {"key": _long(kind.value_type, name)}
        case inspect.StructType():
            return {each.encode_name: _long(each.type, each.name) for each in kind.fields}
        case _:
            return _LONG_VALUES.get(type(kind), name)


def _lists(command: click.Command, words: str = "") -> Iterator[str]:
    """The verbs that are called lists."""
    if not isinstance(command, click.Group):
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        if name == "list":
            yield f"{words}list"
        found = command.get_command(context, name)
        assert found is not None
        yield from _lists(found, f"{words}{name} ")


def test_every_list_is_looked_at_here() -> None:
    assert set(_lists(cli)) <= {*_AT_A_DISPATCHER, *_AT_A_QUEUE}


@pytest.mark.parametrize("verb", _AT_A_DISPATCHER)
def test_what_a_dispatcher_lists_fits(verb: str) -> None:
    shown = typed(*verb.split(), dispatcher=_Longwinded(), clock=Hurried())
    assert shown.code == 0, shown.errors
    assert max(map(len, shown.lines)) > COLUMNS * 3 // 5
    assert [each for each in shown.lines if len(each) > COLUMNS] == []


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with something of everything that a queue lists."""
    url = f"file://{tmp_path_factory.mktemp('store')}"

    async def fill() -> None:
        async with await Queue.open(url, name="default") as queue:
            await queue.submit(_TYPE, {"n": 1}, key="a" * 100)
            await queue.batch(_TYPE, [1, 2], then=_TYPE)
            await queue.limits.set(_LONG[:60], concurrency=5)
            zone = "America/Argentina/Buenos_Aires"
            cron = "0,15,30,45 3 * * 1-5"
            await queue.schedules.add(_LONG[:60], cron=cron, type=_TYPE, time_zone=zone)

    asyncio.run(fill())
    return url


@pytest.mark.parametrize("verb", _AT_A_QUEUE)
def test_what_a_queue_lists_fits(verb: str, store: str) -> None:
    shown = typed(*verb.split(), "--store", store, clock=Hurried())
    assert shown.code == 0, shown.errors
    assert [each for each in shown.lines if len(each) > COLUMNS] == []
    in_a_pipe = typed(*verb.split(), "--store", store, is_terminal=False, clock=Hurried())
    assert "no room" not in in_a_pipe.errors
    if verb == "queue list":
        # What has to be copied is there whole, and what made room for it is named.
        assert all(each.endswith(_TYPE) for each in shown.lines[1:])
        assert "no room for: type" in shown.errors


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [
        (60, ""),
        (59, "third"),
        (40, "first, third"),
        (16, "first, third, last"),
        (4, "first, second, third, last"),
    ],
)
def test_columns_are_left_out_in_the_order_that_their_verb_can_do_without_them(
    columns: int, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, errors = Screen(), Screen()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setenv("COLUMNS", str(columns))
    heads = ("name", "first", "second", "third", "last")
    table(heads, [("1234", *("x" * 30 for _ in range(4)))], least=(3, 1))
    said = f"note: the terminal has no room for: {left_out}.\n" if left_out else ""
    assert errors.getvalue() == said
    shown = Typed(0, out.getvalue(), "")
    assert all(len(each) <= columns for each in shown.lines)


def test_what_is_copied_is_whole_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    out, errors = Screen(), Screen()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setenv("COLUMNS", "40")
    table(("n", "id", "note"), [("1", "y" * 50, "z" * 50)], numbers=(0,), whole=(1,), least=(2,))
    assert "y" * 50 in out.getvalue()
    assert "note" in out.getvalue()
    assert errors.getvalue() == ""
