"""Secrets of AWS Secrets Manager, from a server that speaks its protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.aws import Aws, aws_client
from penstock.kernel.errors import SecretUnavailable, WorkFailed
from penstock.worker.secrets import AwsSecretStore, SecretResolver
from tests.integration.aws_server import AwsServer

VALUE = "hunter2-hunter2"


@pytest.fixture
def client(aws_server: AwsServer) -> Any:
    """A client of the server itself, to put secrets there."""
    return aws_client("secretsmanager", aws=aws_server.aws)


def text(vault: AwsSecretStore, name: str) -> str:
    return asyncio.run(vault.text(name))


def refused(vault: AwsSecretStore, name: str) -> str:
    with pytest.raises(SecretUnavailable) as caught:
        text(vault, name)
    assert caught.value.is_retried
    assert caught.value.__cause__ is None
    assert VALUE not in str(caught.value)
    return caught.value.message


def test_a_secret_is_read_by_a_job(aws_server: AwsServer, client: Any, tmp_path: Path) -> None:
    document = f'{{"user": "ann", "password": "{VALUE}"}}'
    client.create_secret(Name="penstock/shop", SecretString=document)
    resolver = SecretResolver(
        environment={}, folder=tmp_path, prefix="penstock/", vault=AwsSecretStore(aws_server.aws)
    )
    found = asyncio.run(
        resolver.values({"ALL": "aws:penstock/shop", "P": "aws:penstock/shop#password"}, job="a")
    )
    assert found == {"ALL": document, "P": VALUE}


def test_it_is_read_anew_after_a_rotation_by_whoever_remembers_nothing(
    aws_server: AwsServer, client: Any
) -> None:
    client.create_secret(Name="penstock/turning", SecretString="before")
    vault = AwsSecretStore(aws_server.aws)

    async def twice() -> tuple[str, str]:
        first = await vault.text("penstock/turning")
        client.put_secret_value(SecretId="penstock/turning", SecretString="after")
        return first, await vault.text("penstock/turning")

    assert asyncio.run(twice()) == ("before", "before")
    assert text(AwsSecretStore(aws_server.aws), "penstock/turning") == "after"


def test_what_is_not_there_or_no_text_is_said(aws_server: AwsServer, client: Any) -> None:
    client.create_secret(Name="penstock/bytes", SecretBinary=VALUE.encode())
    vault = AwsSecretStore(aws_server.aws)
    assert refused(vault, "penstock/none") == (
        "is not there: AWS Secrets Manager has no secret penstock/none in us-east-1; make it"
    )
    assert "penstock/bytes in AWS Secrets Manager is binary" in refused(vault, "penstock/bytes")
    client.create_secret(Name="penstock/gone", SecretString=VALUE)
    client.delete_secret(SecretId="penstock/gone")
    assert "in us-east-1 answered InvalidRequestException" in refused(vault, "penstock/gone")


def test_a_vault_that_is_away_is_one_sentence_and_retried(tmp_path: Path) -> None:
    nobody = Aws(region="us-east-1", endpoint="http://127.0.0.1:9", access_key="a", secret_key="b")
    resolver = SecretResolver(
        environment={}, folder=tmp_path, prefix="p", vault=AwsSecretStore(nobody)
    )
    with pytest.raises(WorkFailed) as caught:
        asyncio.run(resolver.values({"KEY": "aws:p/q"}, job="clean"))
    assert caught.value.is_retried
    said = caught.value.message
    assert said.startswith(
        "The secret KEY of job clean (aws:p/q) cannot be had now:"
        " AWS Secrets Manager did not answer (EndpointConnectionError: "
    )
    assert said.count("\n") == 0


def test_a_worker_without_a_region_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    assert refused(AwsSecretStore(Aws()), "penstock/db") == (
        "cannot be had: this worker knows no region for AWS Secrets Manager; set AWS_REGION there"
    )


def test_an_answer_that_nobody_understands_is_not_repeated() -> None:
    class Broken:
        """As boto3 is, when an answer is not what it should be."""

        class meta:  # noqa: N801 - boto3's
            region_name = "us-east-1"

        def get_secret_value(self, **_: str) -> object:
            raise ValueError(f"Unable to parse {VALUE!r}")

    vault = AwsSecretStore(Aws(region="us-east-1"))
    vars(vault)["_made"] = Broken()
    assert refused(vault, "penstock/db") == (
        "cannot be had now: AWS Secrets Manager did not answer (ValueError)"
    )
