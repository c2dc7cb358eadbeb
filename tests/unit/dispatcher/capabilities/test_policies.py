"""The policies of sessions: exactly these actions, no more characters than STS takes."""

from __future__ import annotations

import json

import pytest

from penstock.dispatcher.capabilities.credentials import POLICY_CHARACTERS_MAX, session_policy
from penstock.kernel.errors import CredentialsRefused
from penstock.tokens.scopes import Scope
from tests.iam import Policy

READ = Scope.parse("s3://lake/datasets/trips/1/a/")
WRITE = Scope.parse("s3://lake/datasets/tidy/1/a/7-1-x/")
SCRATCH = Scope.parse("s3://lake/scratch/7-1-x/")
ACTIONS = (
    *("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"),
    *("s3:DeleteObject", "s3:GetObjectVersion", "s3:PutObjectAcl", "s3:PutObjectTagging"),
    *("s3:GetObjectTagging", "s3:RestoreObject", "s3:BypassGovernanceRetention", "s3:*"),
)


def policy(read: list[Scope], write: list[Scope], **fields: str) -> Policy:
    return Policy(session_policy(read=read, write=write, **fields))


def allowed(found: Policy, key: str, bucket: str = "lake") -> set[str]:
    arn = f"arn:aws:s3:::{bucket}/{key}"
    return {each for each in ACTIONS if found.allows(each, arn)}


def test_what_is_read_may_be_got_and_what_is_written_may_be_put() -> None:
    found = policy([READ, SCRATCH], [WRITE, SCRATCH])
    writing = {"s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"}
    assert allowed(found, f"{READ.prefix}part-0") == {"s3:GetObject"}
    assert allowed(found, f"{WRITE.prefix}part-0") == writing
    assert allowed(found, f"{SCRATCH.prefix}part-0") == {"s3:GetObject", *writing}
    for key in ("datasets/trips/1/ab/x", "datasets/trips/1/a", "datasets/trips/1/", "x", ""):
        assert allowed(found, key) == set()
    assert allowed(found, f"{READ.prefix}part-0", bucket="lake2") == set()


def test_lists_are_for_the_folders_alone() -> None:
    found = policy([READ], [WRITE])

    def lists(prefix: str | None, action: str = "s3:ListBucket", bucket: str = "lake") -> bool:
        context = {} if prefix is None else {"s3:prefix": prefix}
        return found.allows(action, f"arn:aws:s3:::{bucket}", context)

    assert lists(READ.prefix)
    assert lists(f"{READ.prefix}part-")
    assert lists(WRITE.prefix)
    for prefix in (None, "", "datasets/", READ.prefix[:-1], f"{READ.prefix[:-1]}b/", "*"):
        assert not lists(prefix)
    assert not lists(READ.prefix, bucket="lake2")
    assert not lists(READ.prefix, "s3:ListBucketVersions")
    assert not lists(READ.prefix, "s3:ListBucketMultipartUploads")
    assert not found.allows("s3:ListAllMyBuckets", "*")
    assert not found.allows("sts:AssumeRole", "arn:aws:iam::000000000000:role/penstock-task")


def test_folders_of_one_bucket_are_not_listed_in_another() -> None:
    found = policy([READ, Scope.parse("s3://other/in/")], [])
    assert found.allows("s3:ListBucket", "arn:aws:s3:::other", {"s3:prefix": "in/"})
    assert not found.allows("s3:ListBucket", "arn:aws:s3:::other", {"s3:prefix": READ.prefix})
    assert not found.allows("s3:ListBucket", "arn:aws:s3:::lake", {"s3:prefix": "in/"})


def test_the_partition_is_the_one_of_the_role() -> None:
    found = policy([READ], [], partition="aws-cn")
    assert found.allows("s3:GetObject", f"arn:aws-cn:s3:::lake/{READ.prefix}x")
    assert not found.allows("s3:GetObject", f"arn:aws:s3:::lake/{READ.prefix}x")


def test_a_folder_below_another_of_its_kind_is_left_out_and_nothing_else() -> None:
    below = Scope.parse(f"{READ}deeper/")
    assert session_policy(read=[READ, below, READ], write=[]) == session_policy(
        read=[READ], write=[]
    )
    found = policy([READ], [below])
    # A folder that is read does not stand for one that is written, nor the other way round.
    assert "s3:GetObject" in allowed(found, f"{below.prefix}x")
    assert "s3:PutObject" in allowed(found, f"{below.prefix}x")
    assert "s3:PutObject" not in allowed(found, f"{READ.prefix}x")
    text = session_policy(read=[READ], write=[below])
    assert text.count(READ.prefix) == text.count(below.prefix) + 2 == 3


def test_brothers_are_never_merged_into_their_parent() -> None:
    children = [Scope.parse(f"s3://lake/in/{each}/") for each in "0123456789abcdef"]
    found = policy(children, [])
    assert allowed(found, "in/0/x") == {"s3:GetObject"}
    assert allowed(found, "in/g/x") == set()
    assert allowed(found, "in/x") == set()


def real(dataset: str, hour: int) -> Scope:
    """A folder with names as Penstock makes them."""
    generation = "0190c1c0-0000-7000-8000-000000000000"
    attempt = f"{1000 + hour}-1-{'a' * 24}"
    return Scope.parse(
        f"s3://acme-lake/prod/datasets/{dataset}/{generation}/2020-01-05T{hour:02}/{attempt}/"
    )


@pytest.mark.parametrize(("most", "is_written"), [(5, True), (7, False)])
def test_how_many_folders_fit_is_what_the_documents_say(most: int, is_written: bool) -> None:
    scratch = Scope.parse(f"s3://acme-lake/prod/scratch/1000-1-{'a' * 24}/")
    own = [scratch] if is_written else []
    write = [real("clean", 0), scratch] if is_written else []

    def made(count: int) -> str:
        reads = [real("raw_events", hour) for hour in range(count)]
        return session_policy(read=[*reads, *own], write=write)

    assert made(most)
    with pytest.raises(CredentialsRefused) as no:
        made(most + 1)
    assert no.value.kind == "too many folders"


def test_eight_pairs_of_ordinary_folders_fit() -> None:
    names = [f"s3://lake/datasets/trips/2026/{day:02}/17-1-{'x' * 24}/" for day in range(8)]
    text = session_policy(read=map(Scope.parse, names[:4]), write=map(Scope.parse, names[4:]))
    assert len(text) <= POLICY_CHARACTERS_MAX
    assert json.loads(text)["Version"] == "2012-10-17"


def test_more_than_fit_are_refused_with_what_to_do() -> None:
    names = [f"s3://lake/datasets/trips/{day:02}/{'x' * 60}/" for day in range(30)]
    with pytest.raises(CredentialsRefused, match="29 folders to read and 1 folder to write") as no:
        session_policy(read=map(Scope.parse, names[1:]), write=[Scope.parse(names[0])])
    assert no.value.kind == "too many folders"
    assert "read: all" in no.value.hint
    assert "2,048" in no.value.message


def test_without_a_folder_there_is_no_policy() -> None:
    with pytest.raises(CredentialsRefused, match="no folder"):
        session_policy(read=[], write=[])


@pytest.mark.parametrize(
    "prefix",
    ["a*/", "a?/", "${aws:username}/", "$/", 'a"/', "a\\/", "a\n/", "\xe9/", "a b/", "a", "*", ""],
)
def test_what_means_more_in_a_policy_is_refused_even_if_a_scope_had_it(prefix: str) -> None:
    forged = Scope.parse("s3://lake/a/")
    object.__setattr__(forged, "prefix", prefix)
    for read, write in (([forged], []), ([], [forged]), ([READ, forged], [WRITE])):
        with pytest.raises(CredentialsRefused, match="not a folder"):
            session_policy(read=read, write=write)


def test_it_is_refused_below_a_folder_of_the_other_kind_too() -> None:
    forged = Scope.parse("s3://lake/a/")
    object.__setattr__(forged, "prefix", f"{READ.prefix}*/")
    with pytest.raises(CredentialsRefused, match="not a folder"):
        session_policy(read=[READ], write=[forged])


@pytest.mark.parametrize("bucket", ["*", "lake/*", "la?e", "${a}", ""])
def test_no_bucket_means_more_either(bucket: str) -> None:
    forged = Scope.parse("s3://lake/a/")
    object.__setattr__(forged, "bucket", bucket)
    with pytest.raises(CredentialsRefused, match="not a folder"):
        session_policy(read=[forged], write=[])


def test_folders_of_a_machine_are_in_no_policy() -> None:
    with pytest.raises(CredentialsRefused, match="not a folder"):
        session_policy(read=[Scope.parse("file:///data/a/", schemes=("file",))], write=[])
