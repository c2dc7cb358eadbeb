"""Names of channels and functions, events of invocations, and boto3 that is not there."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.carriers import EVENT_BYTES_MAX, encoded_event, function_name
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import WakeUpChannel, channel_name
from penstock.dispatcher.wakeups.bucket import FAR_POLLING, NEAR_POLLING, polling_of, type_of
from penstock.dispatcher.wakeups.sqs import SqsSettings
from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.errors import InvalidInput
from penstock.queue.ids import check_name

OPERATORS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}", fullmatch=True)
CHANNELS = st.builds(WakeUpChannel, OPERATORS, st.sampled_from(Priority))


@given(CHANNELS, CHANNELS, st.integers(40, 100))
def test_channels_have_names_of_their_own(
    one: WakeUpChannel, two: WakeUpChannel, most: int
) -> None:
    names = {each: channel_name(each, characters_max=most) for each in (one, two)}
    assert len(set(names.values())) == len(names)
    for name in names.values():
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,%d}" % most, name)  # noqa: UP031 - braces are the pattern's
    check_name(type_of(one), what="type")


def test_people_can_read_the_name_of_a_channel() -> None:
    name = channel_name(WakeUpChannel("etl.clean:run", Priority.BULK), characters_max=80)
    assert re.fullmatch(r"etl-clean-run-[0-9a-f]{12}-bulk", name)


def test_the_function_of_an_operator() -> None:
    assert function_name("etl.clean:handler", {}) == "etl-clean-handler"
    arn = "arn:aws:lambda:eu-west-1:1:function:x"
    assert function_name("clean", {"clean": arn}) == arn
    with pytest.raises(InvalidInput, match="No function can have the name"):
        function_name("x" * 65, {})


def test_a_payload_that_is_too_large_is_left_out() -> None:
    task = {"task_id": 1, "job": "j", "operator": "o", "payload": {"key": "x"}}
    assert json.loads(encoded_event(task, dispatcher_url="u", claim_token="t")) == {
        "dispatcher": "u",
        "claim_token": "t",
        **task,
    }
    large = {**task, "payload": {"key": "x" * EVENT_BYTES_MAX}}
    event = json.loads(encoded_event(large, dispatcher_url="u", claim_token="t"))
    assert event == {"dispatcher": "u", "claim_token": "t", **task, "payload": None}


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidInput, match="boto3 is needed for SQS") as refused:
        aws_client("sqs", aws=Aws())
    assert refused.value.hint == "pip install 'penstock[aws]'"


def test_a_client_that_cannot_be_made() -> None:
    with pytest.raises(InvalidInput, match="no client for SQS"):
        aws_client("sqs", aws=Aws(region="x", endpoint="nonsense"))
    assert "hidden" not in repr(Aws(secret_key="hidden"))
    assert error_code(OSError("x")) == ""


@pytest.mark.parametrize(
    "wrong", [{"wait_seconds": 0}, {"wait_seconds": 21}, {"visibility_seconds": 0}]
)
def test_settings_that_sqs_would_refuse(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="SQS needs wait_seconds"):
        SqsSettings(prefix="x", **wrong)
    with pytest.raises(InvalidInput, match="30 characters"):
        SqsSettings(prefix="x" * 31)


def test_a_store_nearby_is_looked_at_often() -> None:
    assert polling_of("file:///data") == polling_of("memory://") == NEAR_POLLING
    assert polling_of("s3://bucket/root") == FAR_POLLING
