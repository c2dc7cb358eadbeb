"""A real S3 with a real STS: SeaweedFS by itself, or AWS where a role and a bucket are named.

For AWS set PENSTOCK_TEST_AWS_ROLE and PENSTOCK_TEST_AWS_BUCKET, and credentials and a region as for
every tool of AWS: they may assume the role, and read, write and delete in the bucket. Everything is
below a folder of its own, which is removed.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import boto3
import botocore.config
import botocore.exceptions

from penstock.dispatcher.capabilities.credentials import (
    SESSION_SECONDS,
    CredentialMinter,
    MintedCredentials,
    make_minter,
)
from penstock.kernel.aws import Aws
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, system_entropy
from penstock.store.s3.local import LocalS3
from penstock.tokens.claims import Claims, Grants, ReadGrant, WriteGrant

ROLE_VARIABLE: Final = "PENSTOCK_TEST_AWS_ROLE"
BUCKET_VARIABLE: Final = "PENSTOCK_TEST_AWS_BUCKET"
_QUICK: Final = botocore.config.Config(
    connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 2}
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A bucket, a role, and who may assume it."""

    bucket: str
    role: str
    region: str
    endpoint: str | None
    own: Mapping[str, str]
    """The credentials of who owns the bucket; empty to have them found."""
    root: str
    """The folder that everything is below, with a slash at its end."""
    signing_key: bytes = b""
    """What the server signs its session tokens with; empty if that is not known."""

    @property
    def is_aws(self) -> bool:
        return self.endpoint is None

    def url(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.root}{key}"

    def client(self, service: str = "s3", **keys: str) -> Any:
        """A client of the owner, or of whoever has these keys."""
        said = keys or self.own
        return boto3.session.Session().client(
            service,
            region_name=self.region,
            endpoint_url=self.endpoint,
            config=_QUICK,
            **said,
        )

    def minter(self) -> CredentialMinter:
        own = {
            "access_key": self.own.get("aws_access_key_id"),
            "secret_key": self.own.get("aws_secret_access_key"),
        }
        option = f"&endpoint={self.endpoint}" if self.endpoint else ""
        return make_minter(
            store_url=f"s3://{self.bucket}/{self.root}?region={self.region}{option}",
            role=self.role,
            sts=Aws(region=self.region, endpoint=self.endpoint, **own),
            environment={},
            clock=SystemClock(),
        )

    async def mint(
        self, *, read: Sequence[str] = (), write: Sequence[str] = ()
    ) -> MintedCredentials:
        """Credentials for these folders."""
        reads = tuple(self.url(each) for each in read)
        grants = Grants(
            read=(ReadGrant(dataset="d", version="v", prefixes=reads),),
            write=tuple(WriteGrant(dataset="d", version="v", prefix=self.url(e)) for e in write),
        )
        minter = self.minter()
        try:
            return await minter.mint(claims(grants))
        finally:
            minter.close()

    def as_minted(self, minted: MintedCredentials, **keys: str) -> Any:
        """A client with minted credentials, some of them changed."""
        said = {
            "aws_access_key_id": minted.access_key,
            "aws_secret_access_key": minted.secret_key,
            "aws_session_token": minted.session_token,
        }
        return self.client(**{**said, **keys})

    def aged(self, minted: MintedCredentials, seconds: int) -> str:
        """The session token as it would be if the server had made it that much earlier.

        The server keeps nothing of a session: its token says, under the server's signature, from
        when to when it is good. Signed anew with the server's own key, it is an older one.
        """
        head, body, _ = minted.session_token.split(".")
        said = json.loads(base64.urlsafe_b64decode(f"{body}=="))
        assert said["exp"] - said["iat"] == SESSION_SECONDS
        for name in ("exp", "nbf", "iat"):
            said[name] -= seconds
        signed = f"{head}.{_encoded(json.dumps(said).encode())}"
        signature = hmac.digest(self.signing_key, signed.encode(), "sha256")
        return f"{signed}.{_encoded(signature)}"

    def remove_all(self) -> None:
        s3 = self.client()
        for page in s3.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.root
        ):
            for each in page.get("Contents", ()):
                s3.delete_object(Bucket=self.bucket, Key=each["Key"])


def seaweedfs_place(server: LocalS3, folder: Path) -> Place:
    config = json.loads((folder / "iam.json").read_text())
    return Place(
        bucket="penstock",
        role=server.task_role,
        region="us-east-1",
        endpoint=server.endpoint,
        own={
            "aws_access_key_id": server.credentials.access_key,
            "aws_secret_access_key": server.credentials.secret_key,
        },
        root=f"{new_id(system_entropy())}/",
        signing_key=base64.b64decode(config["sts"]["signingKey"]),
    )


def aws_place(environment: Mapping[str, str]) -> Place:
    session = boto3.session.Session()
    return Place(
        bucket=environment[BUCKET_VARIABLE],
        role=environment[ROLE_VARIABLE],
        region=session.region_name or "us-east-1",
        endpoint=None,
        own={},
        root=f"penstock-tests/{new_id(system_entropy())}/",
    )


def refusal(error: botocore.exceptions.ClientError) -> tuple[int, str]:
    """The status and the code of an answer that is an error."""
    status: int = error.response["ResponseMetadata"]["HTTPStatusCode"]
    return status, error.response["Error"]["Code"]


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def claims(grants: Grants) -> Claims:
    """A token's claims that grant this."""
    return Claims(
        iss="penstock/default",
        aud="penstock:task",
        sub="task:7:1",
        iat=0,
        nbf=0,
        exp=0,
        jti="j",
        org="default",
        task_id=7,
        attempt=1,
        grants=grants,
    )
