"""Policies that people set: the one of the bucket, and those of `docs/iam.md`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import cli
from penstock.dispatcher.capabilities.credentials import bucket_policy, partition_of, session_policy
from penstock.kernel.errors import InvalidInput
from penstock.settings import Settings
from penstock.tokens.scopes import Scope
from tests.iam import Policy

ROLE = "arn:aws:iam::123456789012:role/penstock-task"
OTHER = "arn:aws:iam::123456789012:role/penstock-dispatcher"
STORE = "s3://my-lake/penstock"
LAKE = "arn:aws:s3:::my-lake"
PAGE = Path(__file__).parents[4] / "docs" / "iam.md"
TASK = {"aws:PrincipalArn": ROLE, "aws:SecureTransport": "true"}


def made(**fields: str) -> Policy:
    said = {"store_url": STORE, "role": ROLE, **fields}
    return Policy(json.dumps(bucket_policy(**said)))


def test_tasks_are_denied_what_no_session_is_for() -> None:
    found = made()
    for key in ("penstock/datasets/a/x", "penstock/scratch/7-1-x/x"):
        arn = f"{LAKE}/{key}"
        for action in ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"):
            assert found.verdict(action, arn, TASK) == ""
        for action in ("s3:DeleteObject", "s3:PutObjectAcl", "s3:GetObjectVersion"):
            assert found.denies(action, arn, TASK)
    for key in (
        "penstock/queues/wake-ups/x",
        "penstock/.penstock/marker",
        "x",
        "penstock/datasets",
    ):
        assert found.denies("s3:GetObject", f"{LAKE}/{key}", TASK)
        assert found.denies("s3:PutObject", f"{LAKE}/{key}", TASK)
    assert found.denies("s3:PutBucketPolicy", LAKE, TASK)


def test_tasks_list_below_two_folders_only() -> None:
    found = made()
    for prefix in ("penstock/datasets/a/", "penstock/scratch/7-1-x/"):
        assert found.verdict("s3:ListBucket", LAKE, {**TASK, "s3:prefix": prefix}) == ""
    for context in ({}, {"s3:prefix": ""}, {"s3:prefix": "penstock/"}, {"s3:prefix": "p"}):
        assert found.denies("s3:ListBucket", LAKE, {**TASK, **context})


def test_others_are_denied_nothing_but_what_is_not_over_tls() -> None:
    found = made(vpc_endpoint="vpce-1a2b3c4d")
    safe = {"aws:PrincipalArn": OTHER, "aws:SecureTransport": "true"}
    for action in ("s3:GetObject", "s3:DeleteObject", "s3:ListBucket"):
        assert found.verdict(action, f"{LAKE}/penstock/queues/x", safe) == ""
        unsafe = {**safe, "aws:SecureTransport": "false"}
        assert found.denies(action, f"{LAKE}/penstock/queues/x", unsafe)


def test_tasks_come_through_the_endpoint_if_there_is_one() -> None:
    found = made(vpc_endpoint="vpce-1a2b3c4d")
    arn = f"{LAKE}/penstock/datasets/a/x"
    inside = {**TASK, "aws:SourceVpce": "vpce-1a2b3c4d"}
    assert found.verdict("s3:GetObject", arn, inside) == ""
    assert found.denies("s3:GetObject", arn, {**TASK, "aws:SourceVpce": "vpce-00000000"})
    assert found.denies("s3:GetObject", arn, TASK)


def test_a_store_that_is_a_whole_bucket() -> None:
    found = made(store_url="s3://my-lake?region=eu-west-1")
    assert found.verdict("s3:GetObject", f"{LAKE}/datasets/a/x", TASK) == ""
    assert found.denies("s3:GetObject", f"{LAKE}/queues/a/x", TASK)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store_url": "file:///data"}, "Only a bucket"),
        ({"store_url": "s3://my-lake/a*"}, "Nothing can be granted"),
        ({"role": "arn:aws:iam::123456789012:role/*"}, "not the ARN of a role"),
        ({"role": "arn:aws:iam::123456789012:user/x"}, "not the ARN of a role"),
        ({"vpc_endpoint": "vpce-*"}, "not the id of a VPC endpoint"),
    ],
)
def test_what_cannot_be_right_is_refused(fields: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        made(**fields)


def test_partitions() -> None:
    assert partition_of("arn:aws-us-gov:iam::123456789012:role/a/b") == "aws-us-gov"
    assert made(role=ROLE.replace("aws", "aws-cn", 1)).denies(
        "s3:GetObject",
        "arn:aws-cn:s3:::my-lake/x",
        {"aws:PrincipalArn": ROLE.replace("aws", "aws-cn", 1)},
    )


def test_the_verb_prints_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["keys", "bucket-policy", "--store", STORE]
    runner = CliRunner()
    for more in ([], ["--json"]):
        shown = runner.invoke(cli, [*words, "--role", ROLE, *more])
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.output) == bucket_policy(store_url=STORE, role=ROLE)
    monkeypatch.setenv("PENSTOCK_TASK_ROLE", ROLE)
    assert json.loads(runner.invoke(cli, words).output)["Statement"]
    monkeypatch.delenv("PENSTOCK_TASK_ROLE")
    nothing = runner.invoke(cli, words)
    assert isinstance(nothing.exception, InvalidInput)
    assert "--role" in nothing.exception.hint


def blocks() -> dict[str, list[Policy]]:
    """The policies of the page, by the headings that they stand below."""
    found: dict[str, list[Policy]] = {}
    heading = ""
    for title, block in re.findall(
        r"^## ([^\n]+)$|^```json\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    ):
        heading = title or heading
        if block:
            found.setdefault(heading, []).append(Policy(block))
    return found


def test_the_page_has_a_policy_for_everybody() -> None:
    assert {heading: len(each) for heading, each in blocks().items()} == {
        "Producers": 1,
        "Workers": 2,
        "Dispatchers": 2,
        "The query service": 1,
        "The role of tasks": 2,
    }


OBJECTS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
KEYS = (
    *("queues/orders/tasks/0/x", "queues/wake-ups/tasks/0/x", "queues/orders2/x", "datasets/a/x"),
    *("scratch/7-1-x/x", ".penstock/marker", "other/x", "datasets/a/1/p/current.json"),
    *("datasets/a/1/p/7-1-x/manifest.json", "datasets/a/1/p/7-1-x/_manifest.json"),
    "datasets/a/metadata/snap-1-x.avro",
)


@pytest.mark.parametrize(
    ("heading", "allowed"),
    [
        ("Producers", {"queues/orders/tasks/0/x": "gpd", ".penstock/marker": "gpd"}),
        (
            "Workers",
            {
                "queues/wake-ups/tasks/0/x": "gpd",
                "datasets/a/x": "gpda",
                "datasets/a/1/p/current.json": "gpda",
                "datasets/a/1/p/7-1-x/manifest.json": "gpda",
                "datasets/a/1/p/7-1-x/_manifest.json": "gpda",
                "datasets/a/metadata/snap-1-x.avro": "gpda",
                "scratch/7-1-x/x": "gpda",
                ".penstock/marker": "gpd",
            },
        ),
        (
            "Dispatchers",
            {
                "queues/wake-ups/tasks/0/x": "gpd",
                "datasets/a/x": "d",
                "datasets/a/1/p/current.json": "gpd",
                "datasets/a/1/p/7-1-x/manifest.json": "gd",
                "datasets/a/1/p/7-1-x/_manifest.json": "gd",
                "datasets/a/metadata/snap-1-x.avro": "gpd",
                "scratch/7-1-x/x": "d",
                ".penstock/marker": "gpd",
            },
        ),
        (
            "The query service",
            {
                "datasets/a/x": "g",
                "datasets/a/1/p/current.json": "g",
                "datasets/a/1/p/7-1-x/manifest.json": "g",
                "datasets/a/1/p/7-1-x/_manifest.json": "g",
                "datasets/a/metadata/snap-1-x.avro": "g",
            },
        ),
        (
            "The role of tasks",
            {
                "datasets/a/x": "gpa",
                "datasets/a/1/p/current.json": "gpa",
                "datasets/a/1/p/7-1-x/manifest.json": "gpa",
                "datasets/a/1/p/7-1-x/_manifest.json": "gpa",
                "datasets/a/metadata/snap-1-x.avro": "gpa",
                "scratch/7-1-x/x": "gpa",
            },
        ),
    ],
)
def test_what_the_policies_of_the_page_allow_in_the_bucket(
    heading: str, allowed: dict[str, str]
) -> None:
    policy = blocks()[heading][0]
    for key in KEYS:
        arn = f"{LAKE}/penstock/{key}"
        letters = "".join(
            letter
            for letter, action in zip("gpda", OBJECTS, strict=True)
            if policy.allows(action, arn)
        )
        assert letters == allowed.get(key, ""), key
        assert not policy.allows("s3:PutObjectAcl", arn)
        assert not policy.allows("s3:GetObject", arn.replace("my-lake", "my-lake2"))
    assert not policy.allows("s3:PutBucketPolicy", LAKE)
    assert not policy.allows("s3:DeleteBucket", LAKE)


def test_who_may_list_and_who_may_assume() -> None:
    page = blocks()
    for heading in ("Producers", "Workers", "Dispatchers", "The query service"):
        assert page[heading][0].allows("s3:ListBucket", LAKE)
    tasks = page["The role of tasks"][0]
    assert not tasks.allows("s3:ListBucket", LAKE)
    assert not tasks.allows("s3:ListBucket", LAKE, {"s3:prefix": "penstock/queues/"})
    assert tasks.allows("s3:ListBucket", LAKE, {"s3:prefix": "penstock/datasets/a/"})
    for heading, policies in page.items():
        may = any(each.allows("sts:AssumeRole", ROLE) for each in policies[:1])
        assert may is (heading == "Dispatchers")
    assert not page["Dispatchers"][0].allows("sts:AssumeRole", OTHER)


def test_the_role_of_tasks_trusts_dispatchers_alone() -> None:
    trust = blocks()["The role of tasks"][1]
    assert trust.allows("sts:AssumeRole", by=OTHER)
    for nobody in (ROLE, "arn:aws:iam::123456789012:root", "*", ""):
        assert not trust.allows("sts:AssumeRole", by=nobody)


def test_what_sessions_are_for_is_what_the_role_may_and_the_bucket_does_not_deny() -> None:
    """A session is allowed what its own policy, that of its role and that of the bucket allow."""
    scope = Scope.parse(f"{STORE}/datasets/a/1/p/7-1-x/")
    session = Policy(session_policy(read=[scope], write=[scope]))
    role, bucket = blocks()["The role of tasks"][0], made()
    arn = f"{LAKE}/{scope.prefix}x"
    for action in (
        *("s3:GetObject", "s3:PutObject"),
        *("s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"),
    ):
        assert session.allows(action, arn)
        assert role.allows(action, arn)
        assert not bucket.denies(action, arn, TASK)
    listing = {**TASK, "s3:prefix": scope.prefix}
    assert session.allows("s3:ListBucket", LAKE, listing)
    assert role.allows("s3:ListBucket", LAKE, listing)
    assert not bucket.denies("s3:ListBucket", LAKE, listing)


def test_what_the_services_of_aws_are_for() -> None:
    page = blocks()
    workers, dispatchers = page["Workers"][1], page["Dispatchers"][1]
    queue = f"arn:aws:sqs:eu-west-1:123456789012:{Settings().sqs_prefix}a-normal"
    assert workers.allows("sqs:ReceiveMessage", queue)
    assert not workers.allows("sqs:SendMessage", queue)
    assert not workers.allows("sqs:ReceiveMessage", queue.replace("penstock", "other"))
    secret = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:penstock/db-AbCdEf"
    assert workers.allows("secretsmanager:GetSecretValue", secret)
    assert not workers.allows("secretsmanager:GetSecretValue", secret.replace("penstock/", ""))
    assert dispatchers.allows("sqs:SendMessage", queue)
    assert not dispatchers.allows("sqs:ReceiveMessage", queue)
    assert dispatchers.allows("cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "Penstock"})
    assert not dispatchers.allows("cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "AWS"})
    key = "arn:aws:kms:eu-west-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    assert dispatchers.allows("kms:Sign", key)
    assert not dispatchers.allows("kms:ScheduleKeyDeletion", key)
    assert not dispatchers.allows("secretsmanager:GetSecretValue", secret)
