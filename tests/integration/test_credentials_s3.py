"""Minted credentials on a real S3 with a real STS: inside everything works, outside nothing does.

Run on SeaweedFS, and on AWS where `minting_place` says how.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from penstock.dispatcher.capabilities.credentials import SESSION_SECONDS, MintedCredentials
from penstock.kernel.errors import CredentialsRefused, CredentialsUnavailable, PenstockError
from penstock.store.s3.local import LocalS3
from penstock.tokens.claims import Grants, ReadGrant, WriteGrant
from tests.conftest import Background
from tests.integration.minting_place import (
    BUCKET_VARIABLE,
    ROLE_VARIABLE,
    Place,
    aws_place,
    claims,
    refusal,
    seaweedfs_place,
)

READ, WRITE, SCRATCH = "in/a/", "out/a/", "scratch/7-1-x/"
THERE = ("in/a/x", "in/ab/x", "in/x", "out/a/x", "out/ab/x", "other/x", "scratch/7-2-x/x")
PART_BYTES = 5 * 2**20


@dataclass
class Stage:
    """A place with something in it, and credentials for a part of that."""

    place: Place
    minted: MintedCredentials
    s3: Any
    uploads: dict[str, str] = field(default_factory=dict)

    def at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.place.bucket, "Key": f"{self.place.root}{key}"}

    def below(self, key: str) -> dict[str, str]:
        return {"Bucket": self.place.bucket, "Prefix": f"{self.place.root}{key}"}

    def upload(self, key: str) -> str:
        """An upload of the owner's that is not over."""
        if key not in self.uploads:
            made = self.place.client().create_multipart_upload(**self.at(key))
            self.uploads[key] = made["UploadId"]
        return self.uploads[key]

    def holds(self, key: str) -> bytes:
        found: bytes = self.place.client().get_object(**self.at(key))["Body"].read()
        return found


@pytest.fixture(scope="module", params=["seaweedfs", "aws"])
def stage(
    request: pytest.FixtureRequest,
    background: Background,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    server: LocalS3 | None = None
    if request.param == "aws":
        if not {ROLE_VARIABLE, BUCKET_VARIABLE} <= os.environ.keys():
            pytest.skip(f"no AWS: {ROLE_VARIABLE} and {BUCKET_VARIABLE} are not set")
        place = aws_place(os.environ)
    else:
        folder: Path = tmp_path_factory.mktemp("minting")
        server = LocalS3(folder, mints=True, grace_seconds=1)
        try:
            background.run(server.start())
        except PenstockError as error:
            background.run(server.stop())
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no S3 server: {error.message} {error.hint}")
        assert stat.S_IMODE((folder / "iam.json").stat().st_mode) == 0o600
        place = seaweedfs_place(server, folder)
    made = Stage(place, asyncio.run(mint(place)), None)
    made.s3 = place.as_minted(made.minted)
    for key in THERE:
        place.client().put_object(**made.at(key), Body=key.encode())
    yield made
    for key, upload in made.uploads.items():
        place.client().abort_multipart_upload(**made.at(key), UploadId=upload)
    place.remove_all()
    if server is not None:
        background.run(server.stop())


async def mint(place: Place) -> MintedCredentials:
    return await place.mint(read=[READ, SCRATCH], write=[WRITE, SCRATCH])


def is_forbidden(work: Callable[[], object]) -> None:
    with pytest.raises(botocore.exceptions.ClientError) as no:
        work()
    status, code = refusal(no.value)
    # A HEAD has no body, and so no code but its status.
    assert (status, code) in {(403, "AccessDenied"), (403, "403")}


def test_what_is_read_can_be_got_and_listed(stage: Stage) -> None:
    assert stage.s3.get_object(**stage.at("in/a/x"))["Body"].read() == b"in/a/x"
    assert stage.s3.get_object(**stage.at("in/a/x"), Range="bytes=0-1")["Body"].read() == b"in"
    assert stage.s3.head_object(**stage.at("in/a/x"))["ContentLength"] == 6
    found = stage.s3.list_objects_v2(**stage.below(READ))["Contents"]
    assert [each["Key"] for each in found] == [f"{stage.place.root}in/a/x"]
    assert stage.s3.list_objects_v2(**stage.below("in/a/x"))["KeyCount"] == 1
    assert stage.s3.list_objects_v2(**stage.below(READ), Delimiter="/")["KeyCount"] == 1


def test_what_is_written_can_be_put_and_listed(stage: Stage) -> None:
    stage.s3.put_object(**stage.at("out/a/new"), Body=b"new")
    assert stage.holds("out/a/new") == b"new"
    stage.s3.copy_object(**stage.at("out/a/copy"), CopySource=stage.at("in/a/x"))
    assert stage.holds("out/a/copy") == b"in/a/x"
    found = stage.s3.list_objects_v2(**stage.below(WRITE))["Contents"]
    assert f"{stage.place.root}out/a/new" in [each["Key"] for each in found]


def test_scratch_is_read_and_written(stage: Stage) -> None:
    stage.s3.put_object(**stage.at(f"{SCRATCH}x"), Body=b"mine")
    assert stage.s3.get_object(**stage.at(f"{SCRATCH}x"))["Body"].read() == b"mine"


def test_large_objects_are_written_in_parts_and_given_up(stage: Stage) -> None:
    s3, place = stage.s3, stage.at("out/a/large")
    upload = {**place, "UploadId": s3.create_multipart_upload(**place)["UploadId"]}
    first = s3.upload_part(**upload, PartNumber=1, Body=b"1" * PART_BYTES)
    second = s3.upload_part_copy(**upload, PartNumber=2, CopySource=stage.at("in/a/x"))
    parts = [
        {"PartNumber": 1, "ETag": first["ETag"]},
        {"PartNumber": 2, "ETag": second["CopyPartResult"]["ETag"]},
    ]
    assert len(s3.list_parts(**upload)["Parts"]) == 2
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert stage.holds("out/a/large") == b"1" * PART_BYTES + b"in/a/x"
    given_up = s3.create_multipart_upload(**place)["UploadId"]
    s3.abort_multipart_upload(**place, UploadId=given_up)


@pytest.mark.parametrize(
    "key", ["in/ab/x", "in/x", "other/x", "scratch/7-2-x/x", "out/a/x", "in/a", "nothing/there"]
)
def test_nothing_else_is_got(stage: Stage, key: str) -> None:
    is_forbidden(lambda: stage.s3.get_object(**stage.at(key)))
    is_forbidden(lambda: stage.s3.head_object(**stage.at(key)))


@pytest.mark.parametrize(
    "key", ["out/ab/x", "out/x", "out/a", "other/x", "in/a/x", "scratch/7-2-x/x", "scratch/x"]
)
def test_nothing_else_is_put(stage: Stage, key: str) -> None:
    is_forbidden(lambda: stage.s3.put_object(**stage.at(key), Body=b"wrong"))
    if key in THERE:
        assert stage.holds(key) == key.encode()


@pytest.mark.parametrize(
    "prefix", ["", "in/", "in/a", "in/ab/", "out/", "out/ab/", "other/", "scratch/", "scratch/7"]
)
def test_nothing_else_is_listed(stage: Stage, prefix: str) -> None:
    is_forbidden(lambda: stage.s3.list_objects_v2(**stage.below(prefix)))
    is_forbidden(lambda: stage.s3.list_objects(**stage.below(prefix)))


def test_the_bucket_is_not_listed(stage: Stage) -> None:
    bucket = {"Bucket": stage.place.bucket}
    is_forbidden(lambda: stage.s3.list_objects_v2(**bucket))
    is_forbidden(lambda: stage.s3.list_objects_v2(**bucket, Prefix=""))
    is_forbidden(lambda: stage.s3.list_object_versions(**stage.below(READ)))
    is_forbidden(lambda: stage.s3.list_multipart_uploads(**stage.below(WRITE)))
    is_forbidden(lambda: stage.s3.get_bucket_policy(**bucket))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("other/x", "out/a/stolen"),
        ("in/ab/x", "out/a/stolen"),
        ("out/a/x", "out/a/stolen"),
        ("in/a/x", "other/x"),
        ("in/a/x", "out/ab/x"),
        ("in/a/x", "in/a/x"),
        ("other/x", "other/y"),
    ],
)
def test_nothing_is_copied_from_or_to_elsewhere(stage: Stage, source: str, target: str) -> None:
    copied = {**stage.at(target), "CopySource": stage.at(source)}
    is_forbidden(lambda: stage.s3.copy_object(**copied, MetadataDirective="REPLACE"))
    if target in THERE:
        assert stage.holds(target) == target.encode()


@pytest.mark.parametrize("key", ["out/ab/large", "other/large", "in/a/large"])
def test_no_part_is_written_elsewhere(stage: Stage, key: str) -> None:
    is_forbidden(lambda: stage.s3.create_multipart_upload(**stage.at(key)))
    upload = {**stage.at(key), "UploadId": stage.upload(key)}
    owner = stage.place.client()
    part = owner.upload_part(**upload, PartNumber=1, Body=b"right")
    is_forbidden(lambda: stage.s3.upload_part(**upload, PartNumber=1, Body=b"wrong"))
    is_forbidden(lambda: stage.s3.list_parts(**upload))
    is_forbidden(lambda: stage.s3.abort_multipart_upload(**upload))
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    is_forbidden(lambda: stage.s3.complete_multipart_upload(**upload, MultipartUpload=parts))
    assert len(owner.list_parts(**upload)["Parts"]) == 1


def test_no_part_is_copied_from_elsewhere(stage: Stage) -> None:
    place = stage.at("out/a/large2")
    upload = {**place, "UploadId": stage.s3.create_multipart_upload(**place)["UploadId"]}
    copied = {**upload, "PartNumber": 1, "CopySource": stage.at("other/x")}
    is_forbidden(lambda: stage.s3.upload_part_copy(**copied))
    stage.s3.abort_multipart_upload(**upload)


@pytest.mark.parametrize("key", ["in/a/x", "out/a/x", "other/x", "in/ab/x"])
def test_nothing_is_deleted_not_even_its_own(stage: Stage, key: str) -> None:
    is_forbidden(lambda: stage.s3.delete_object(**stage.at(key)))
    wanted = {"Objects": [{"Key": stage.at(key)["Key"]}]}
    answer = stage.s3.delete_objects(Bucket=stage.place.bucket, Delete=wanted)
    assert [each["Code"] for each in answer["Errors"]] == ["AccessDenied"]
    assert stage.holds(key) == key.encode()


def test_nothing_is_opened_to_others(stage: Stage) -> None:
    is_forbidden(lambda: stage.s3.put_object_acl(**stage.at("out/a/x"), ACL="public-read"))
    tags = {"TagSet": [{"Key": "a", "Value": "b"}]}
    is_forbidden(lambda: stage.s3.put_object_tagging(**stage.at("out/a/x"), Tagging=tags))
    is_forbidden(lambda: stage.s3.get_object_tagging(**stage.at("in/a/x")))


def test_a_session_does_not_rid_itself_of_its_policy(stage: Stage) -> None:
    minted = stage.minted
    sts = stage.place.client(
        "sts",
        aws_access_key_id=minted.access_key,
        aws_secret_access_key=minted.secret_key,
        aws_session_token=minted.session_token,
    )
    is_forbidden(lambda: sts.assume_role(RoleArn=stage.place.role, RoleSessionName="mine"))
    is_forbidden(lambda: sts.get_federation_token(Name="mine"))


def test_less_can_be_minted(stage: Stage) -> None:
    less = stage.place.as_minted(asyncio.run(stage.place.mint(read=[READ])))
    assert less.get_object(**stage.at("in/a/x"))["Body"].read() == b"in/a/x"
    is_forbidden(lambda: less.put_object(**stage.at("out/a/new"), Body=b"no"))
    is_forbidden(lambda: less.list_objects_v2(**stage.below(WRITE)))


def refused_key(stage: Stage, **keys: str) -> None:
    """Credentials that are not right are refused, each server with a word of its own."""
    changed = stage.place.as_minted(stage.minted, **keys)
    tried: list[Callable[[], object]] = [
        lambda: changed.get_object(**stage.at("in/a/x")),
        lambda: changed.put_object(**stage.at("out/a/forged"), Body=b"wrong"),
        lambda: changed.list_objects_v2(**stage.below(READ)),
    ]
    for work in tried:
        with pytest.raises(botocore.exceptions.ClientError) as no:
            work()
        status, code = refusal(no.value)
        assert status in ({400, 403} if stage.place.is_aws else {403})
        assert code in {
            *("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"),
            *("InvalidToken", "ExpiredToken"),
        }


def test_without_its_session_token_a_session_is_nobody(stage: Stage) -> None:
    minted = stage.minted
    bare = stage.place.client(
        aws_access_key_id=minted.access_key, aws_secret_access_key=minted.secret_key
    )
    with pytest.raises(botocore.exceptions.ClientError) as no:
        bare.get_object(**stage.at("in/a/x"))
    assert refusal(no.value)[0] == 403


def test_a_session_token_that_was_changed_is_refused(stage: Stage) -> None:
    token = stage.minted.session_token
    middle = len(token) // 2
    other = "A" if token[middle] != "A" else "B"
    refused_key(stage, aws_session_token=f"{token[:middle]}{other}{token[middle + 1 :]}")
    refused_key(stage, aws_session_token=token[:-20])
    refused_key(stage, aws_session_token="x")


def test_a_secret_that_was_changed_is_refused(stage: Stage) -> None:
    refused_key(stage, aws_secret_access_key=f"{stage.minted.secret_key[:-1]}x")


def test_one_session_with_the_token_of_another_is_refused(stage: Stage) -> None:
    other = asyncio.run(mint(stage.place))
    refused_key(stage, aws_session_token=other.session_token)


def test_a_policy_that_was_widened_in_the_token_is_refused(stage: Stage) -> None:
    if stage.place.is_aws:
        pytest.skip("the session tokens of AWS cannot be read")
    head, body, signature = stage.minted.session_token.split(".")
    said = json.loads(base64.urlsafe_b64decode(f"{body}=="))
    said["spol"] = said["spol"].replace("in/a/", "")
    wider = base64.urlsafe_b64encode(json.dumps(said).encode()).rstrip(b"=").decode()
    refused_key(stage, aws_session_token=f"{head}.{wider}.{signature}")


def test_after_fifteen_minutes_it_is_over(stage: Stage) -> None:
    if stage.place.is_aws:
        pytest.skip("the shortest session of AWS lives for 15 minutes, and is not waited for")
    aged = stage.place.aged(stage.minted, SESSION_SECONDS - 120)
    still = stage.place.as_minted(stage.minted, aws_session_token=aged)
    assert still.get_object(**stage.at("in/a/x"))["Body"].read() == b"in/a/x"
    is_forbidden(lambda: still.get_object(**stage.at("other/x")))
    refused_key(stage, aws_session_token=stage.place.aged(stage.minted, SESSION_SECONDS + 1))


def test_a_day_of_24_hours_is_read_some_hours_at_a_time(stage: Stage) -> None:
    place = stage.place
    hours = [f"in/day/2020-01-05T{hour:02}/{hour + 1}-1-{'a' * 24}/" for hour in range(24)]
    for each in hours:
        place.client().put_object(**stage.at(f"{each}x"), Body=each.encode())
    reads = tuple(place.url(each) for each in hours)
    write = (WriteGrant(dataset="d", version="v", prefix=place.url(WRITE)),)
    grants = Grants(read=(ReadGrant(dataset="d", version="v", prefixes=reads),), write=write)

    async def story() -> None:
        minter, token = place.minter(), claims(grants)
        with pytest.raises(CredentialsRefused) as no:
            await minter.mint(token)
        assert no.value.kind == "too many folders"
        place.as_minted(await minter.mint(token, read=[])).put_object(
            **stage.at("out/a/day"), Body=b"whole"
        )
        for first in range(0, 24, 4):
            some, others = hours[first : first + 4], hours[first - 4 : first] or hours[4:8]
            s3 = place.as_minted(
                await minter.mint(token, read=list(map(place.url, some)), write=[])
            )
            for each in some:
                assert s3.get_object(**stage.at(f"{each}x"))["Body"].read() == each.encode()
            is_forbidden(partial(s3.get_object, **stage.at(f"{others[0]}x")))
            is_forbidden(partial(s3.put_object, **stage.at("out/a/day"), Body=b"no"))
        minter.close()

    asyncio.run(story())
    assert stage.holds("out/a/day") == b"whole"


def test_a_role_that_cannot_be_assumed_is_not_now(stage: Stage) -> None:
    nobody = Place(**{**vars(stage.place), "role": f"{stage.place.role}-that-is-not-there"})
    with pytest.raises(CredentialsUnavailable, match="AccessDenied"):
        asyncio.run(mint(nobody))
