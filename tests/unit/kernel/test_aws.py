"""Clients of AWS print nothing of what they are answered."""

from __future__ import annotations

import logging

import pytest

from penstock.kernel.aws import Aws, aws_client


@pytest.mark.parametrize("service", ["secretsmanager", "lambda", "sts"])
def test_whoever_debugs_everything_sees_no_answers(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    log = logging.getLogger("botocore")
    before = log.level
    log.setLevel(logging.NOTSET)
    try:
        assert logging.getLogger("botocore.parsers").isEnabledFor(logging.DEBUG)
        aws = Aws(region="eu-west-1", access_key="a", secret_key="b")
        aws_client(service, aws=aws).close()
        assert not logging.getLogger("botocore.parsers").isEnabledFor(logging.DEBUG)
    finally:
        log.setLevel(before)
