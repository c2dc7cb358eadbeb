"""The runtime `lambda` on one machine: what a handler is given, and what it is not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import Delivery
from penstock.runtimes.function import FunctionSettings, LambdaRuntime, function
from penstock.testing.runtime_contract import RecordingReporter
from tests.unit.runtimes.benches import work

HANDLER = """
import json, os
from pathlib import Path

def handle(event, context):
    said = {
        "event": event,
        "environment": dict(os.environ),
        "name": context.function_name,
        "request": context.aws_request_id,
        "has_time": 0 < context.get_remaining_time_in_millis() <= 30_000,
    }
    Path(event["config"]["file"]).write_text(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("operator", "handlers"),
    [("mine.handle", {}), ("mine:handle", {}), ("clean-sales", {"clean-sales": "mine.handle"})],
)
def test_a_handler_gets_the_event_and_an_empty_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operator: str, handlers: dict[str, str]
) -> None:
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "mine.py").write_text(HANDLER)
    file = tmp_path / "said.json"
    why = {"partition_key": "p", "start": 1, "end": 5, "payload": {"id": [None]}}
    task = work(operator, tmp_path, config={"file": str(file)}, timeout_seconds=30, payload=why)

    async def main() -> None:
        settings = FunctionSettings(path=(str(tmp_path),), handlers=handlers)
        async with LambdaRuntime(settings) as runtime:
            (made,) = (await runtime.run(task, RecordingReporter())).made
        assert (made.output, made.partition_key) == ("out", "p")

    asyncio.run(main())
    said = json.loads(file.read_text())
    assert said["environment"] == {}
    assert (said["name"], said["request"], said["has_time"]) == (operator, "7-2", True)
    assert said["event"]["payload"] == why
    assert said["event"]["outputs"]["out"]["location"] == (tmp_path / "out").as_uri()
    assert said["event"]["inputs"]["raw"]["location"] is None
    assert "log" not in said["event"]


def test_at_aws_tasks_are_invoked_and_no_worker_runs_them(tmp_path: Path) -> None:
    assert function({}).delivery is Delivery.WAKE
    deployed = function({"is_invoked": True})
    assert deployed.delivery is Delivery.INVOKE
    assert list(deployed.faults("any-name", config={}, resources={"memory": "1GiB"})) == []
    with pytest.raises(WorkFailed, match="at AWS"):
        asyncio.run(deployed.run(work("any-name", tmp_path), RecordingReporter()))


def test_an_operator_without_a_handler_is_a_fault() -> None:
    (fault,) = function({}).faults("clean-sales", config={}, resources={})
    assert fault.field == "operator"
    assert list(function({}).faults("mine.handle", config={}, resources={})) == []
