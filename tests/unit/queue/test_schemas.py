"""Inputs of a type with a schema are refused before anything is sent, and all or none are taken."""

from __future__ import annotations

import sys

import msgspec
import pytest

from penstock.kernel.errors import InvalidInput
from penstock.queue.client import Queue
from penstock.queue.submit_options import (
    SCHEMA_BYTES_MAX,
    SCHEMAS_MAX,
    changed_schemas,
    check_inputs,
)
from penstock.testing import QueueBench, run_queue

RESIZE = {
    "type": "object",
    "properties": {"sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["sizes"],
}
GOOD, BAD = {"sizes": [1, 2]}, {"sizes": [1, "wide"]}
TOLD = 'does not fit the schema of \'resize\' at /sizes/1: "wide" is not of type "integer"'


def test_every_way_to_submit_is_checked_and_nothing_is_sent() -> None:
    async def act(bench: QueueBench) -> None:
        queue = bench.queue
        await queue.configure(schemas={"resize": RESIZE})
        with pytest.raises(InvalidInput, match=TOLD):
            await queue.submit("resize", BAD)
        with pytest.raises(InvalidInput, match=TOLD):
            await queue.submit("resize", BAD, key="k")
        with pytest.raises(InvalidInput, match=f"Input 1 {TOLD}"):
            await queue.submit_many("resize", [GOOD, BAD])
        with pytest.raises(InvalidInput, match=f"Input 1 {TOLD}"):
            await queue.submit_mixed([("mail", BAD), ("resize", BAD)])
        with pytest.raises(InvalidInput, match=TOLD):
            await queue.batch("resize", [BAD])
        with pytest.raises(InvalidInput, match=f"The input of the schedule {TOLD}"):
            await queue.schedules.add("s", cron="0 6 * * *", type="resize", input=BAD)
        assert len(await queue.tasks()) == 0
        assert await queue.schedules.list() == ()
        await queue.submit("resize", GOOD)
        await queue.submit("mail", BAD)
        assert len(await queue.tasks()) == 2

    run_queue(act)


def test_a_producer_follows_when_it_opens_the_queue_and_one_that_did_not_goes_on() -> None:
    async def act(bench: QueueBench) -> None:
        store, entropy = bench.queue.access.store, bench.queue.access.entropy
        early = await Queue.on(store, name=bench.queue.access.layout.queue, entropy=entropy)
        await bench.queue.configure(schemas={"resize": RESIZE})
        await early.submit("resize", BAD)
        late = await Queue.on(store, name=bench.queue.access.layout.queue, entropy=entropy)
        with pytest.raises(InvalidInput, match=TOLD):
            await late.submit("resize", BAD)
        await late.configure(key_seconds=7200)
        assert set((await late.config()).schemas) == {"resize"}
        await late.configure(schemas={"resize": None})
        await late.submit("resize", BAD)
        assert (await late.config()).schemas == {}

    run_queue(act)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "nothing"}, "is not a JSON schema"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "is not part of it"),
        ({"$ref": "file:///etc/hostname"}, "is not part of it"),
        (7, "is not a JSON schema"),
        ({"enum": {1}}, "is not JSON"),
        ({"description": "x" * SCHEMA_BYTES_MAX}, "at most"),
    ],
)
def test_what_is_no_schema_is_refused(schema: object, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        changed_schemas({}, {"resize": schema})


def test_there_are_so_many_schemas_at_most() -> None:
    with pytest.raises(InvalidInput, match=f"at most {SCHEMAS_MAX} schemas"):
        changed_schemas({}, {f"t{number}": True for number in range(SCHEMAS_MAX + 1)})


def test_without_the_package_only_types_with_a_schema_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schemas = {"resize": msgspec.Raw(b'{"type": "null", "title": "of this test alone"}')}
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)
    body = msgspec.Raw(b"1")
    check_inputs(schemas, [("mail", "The input", body)])
    with pytest.raises(InvalidInput, match="needs the package jsonschema-rs") as caught:
        check_inputs(schemas, [("resize", "The input", body)])
    assert "penstock[schemas]" in caught.value.hint
