"""The doctor on a bucket of a real server that keeps former versions."""

from __future__ import annotations

import asyncio
from typing import Any

import boto3
import pytest

from penstock.kernel.entropy import new_id, system_entropy
from penstock.store import doctor
from penstock.store.doctor import CheckMark, StoreReport, examine, open_patient
from penstock.store.opening import Opening
from penstock.store.s3.local import LocalS3


def _boto3(server: LocalS3) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.credentials.access_key,
        aws_secret_access_key=server.credentials.secret_key,
        region_name="us-east-1",
    )


@pytest.fixture(autouse=True)
def _few_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several writers want one key, SeaweedFS has each loser wait whole seconds."""
    monkeypatch.setattr(doctor, "WRITERS", 4)
    monkeypatch.setattr(doctor, "ROUNDS", 1)
    monkeypatch.setattr(doctor, "ROUNDS_OF_TWO", 8)


@pytest.fixture
def versioned_bucket(local_s3: LocalS3) -> str:
    bucket = f"versioned-{new_id(system_entropy(), characters=8)}"
    client = _boto3(local_s3)
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    return bucket


async def _examined(url: str, server: LocalS3) -> StoreReport:
    async with open_patient(url, Opening(credentials=server.credentials)) as patient:
        return await examine(patient)


@pytest.mark.timeout(240)
def test_a_versioned_bucket_is_examined_twice_and_left_without_a_version(
    local_s3: LocalS3, versioned_bucket: str
) -> None:
    """SeaweedFS 4.48 lets a conditional delete and a swap both win here, in 1 race of 11."""
    report = asyncio.run(
        _examined(f"s3://{versioned_bucket}/root?endpoint={local_s3.endpoint}", local_s3)
    )
    again = [each for each in report.findings if "again on a versioned key" in each.check]
    assert len(again) == 12
    wrong = [each for each in report.findings if each.mark is not CheckMark.GOOD]
    assert all(each.check.startswith("delete against swap") for each in wrong), wrong
    assert report.trusted is (not wrong)
    assert report.tombstones_would_do is bool(wrong)
    left = _boto3(local_s3).list_object_versions(Bucket=versioned_bucket, Prefix="root/doctor/")
    assert left.get("Versions", []) + left.get("DeleteMarkers", []) == []


@pytest.mark.timeout(240)
def test_a_server_whose_deletes_are_not_atomic_can_be_trusted_with_tombstones(
    local_s3: LocalS3, versioned_bucket: str
) -> None:
    """The same server, where conditional deletes and swaps both win, with deletes by tombstone."""
    url = f"s3://{versioned_bucket}/root?endpoint={local_s3.endpoint}&deletes=tombstone"
    report = asyncio.run(_examined(url, local_s3))
    assert [each for each in report.findings if each.mark is not CheckMark.GOOD] == []
    assert report.verdict == "This store can be trusted, with deletes by tombstone."
    left = _boto3(local_s3).list_object_versions(Bucket=versioned_bucket)
    kept = {each["Key"] for each in left.get("Versions", [])}
    assert kept == {"root/.penstock/marker"}, "an examination decides nothing for others"
