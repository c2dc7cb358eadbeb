"""What an attempt may touch follows from its own task, and from nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.layout import attempt_name, part
from penstock.dispatcher.capabilities.tokens import FOLDERS_MAX, GRANTS_BYTES_MAX, grants_of
from penstock.dispatcher.tasks.model import ClaimedTask
from penstock.runtimes.base import AttemptPaths
from penstock.tokens.claims import (
    TASK_AUDIENCE,
    TOKEN_BYTES_MAX,
    Claims,
    ReadGrant,
    WriteGrant,
    token_bytes,
)
from penstock.tokens.scopes import Root, Scope, scope_of_location

URL = "s3://lake/one"
ROOT = Root.parse(URL)
GENERATION = "00000000-0000-4000-8000-000000000001"
FED = "00000000-0000-4000-8000-000000000002"
FOLDER = attempt_name(task_id=7, attempt=2, lease_token="secret")


def location(dataset: str, key: str, attempt: int = 1) -> str:
    return f"{URL}/datasets/{dataset}/{FED}/{part(key)}/{attempt}-1-{'a' * 24}"


def given_parts(dataset: str = "raw", *locations: Any, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"dataset": dataset, "uuid": f"uuid of {dataset}", "generation": FED}
    return {**said, "has_data": True, "parts": [{"location": each} for each in locations], **fields}


def claimed(
    *,
    inputs: dict[str, Any] | None = None,
    definition: dict[str, Any] | None = None,
    payload: dict[str, Any] | None = None,
) -> ClaimedTask:
    return ClaimedTask(
        task_id=7,
        attempt=2,
        lease_token="secret",
        lease_expires_at=datetime(2030, 1, 1, tzinfo=UTC),
        heartbeat_ms=10_000,
        timeout_ms=60_000,
        job="clean",
        operator="a:clean",
        runtime="process",
        generation=GENERATION,
        definition_id=1,
        definition=definition if definition is not None else {},
        payload={"partition_key": "p"} if payload is None else payload,
        inputs=inputs or {},
    )


def test_what_is_merged_may_be_read_wherever_the_partition_moves() -> None:
    definition = {"outputs": [{"name": "tidy"}], "datasets": {"tidy": "uuid of tidy"}}
    task = claimed(definition=definition)
    assert grants_of(task, ROOT).read == ()
    own = f"{URL}/datasets/tidy/{GENERATION}/p"
    kept = f"{URL}/datasets/tidy/{FED}/p/3-1-{'a' * 24}"
    for current, folders in (
        ({}, [own]),
        ({"tidy": [{"location": f"{own}/5-1-{'a' * 24}"}]}, [own]),
        ({"tidy": [{"location": kept}]}, [own, kept]),
        ({"tidy": [{"location": f"{URL}/datasets/other/{FED}/p"}]}, [own]),
    ):
        (read,) = grants_of(replace(task, current=current), ROOT).read
        assert (read.dataset, read.version) == ("uuid of tidy", GENERATION)
        assert [each.rstrip("/") for each in read.prefixes] == folders


def test_what_is_merged_into_partitions_that_it_finds_may_be_read_wherever_they_are() -> None:
    definition = {
        "outputs": [{"name": "tidy", "partition_by": "day"}],
        "datasets": {"tidy": "uuid of tidy"},
    }
    task = claimed(definition=definition)
    (read,) = grants_of(replace(task, current={}), ROOT).read
    assert read.prefixes == (f"{URL}/datasets/tidy/{GENERATION}/",)
    # Who only replaces them reads none.
    assert grants_of(task, ROOT).read == ()


def reads(**inputs: Any) -> tuple[ReadGrant, ...]:
    return grants_of(claimed(inputs=inputs), ROOT).read


def test_an_attempt_writes_its_own_folders_and_no_others() -> None:
    definition = {
        "outputs": [{"name": "tidy"}, {"name": "left", "dataset": "other"}],
        "datasets": {"tidy": "uuid of tidy", "other": "uuid of other"},
    }
    found = grants_of(claimed(definition=definition), ROOT)
    assert found.write == (
        WriteGrant(
            dataset="uuid of tidy",
            version=GENERATION,
            prefix=f"{URL}/datasets/tidy/{GENERATION}/p/{FOLDER}/",
        ),
        WriteGrant(
            dataset="uuid of other",
            version=GENERATION,
            prefix=f"{URL}/datasets/other/{GENERATION}/p/{FOLDER}/",
        ),
    )
    assert found.scratch == f"{URL}/scratch/{FOLDER}/"
    assert found.read == ()


@pytest.mark.parametrize("by", ["", "day"])
@pytest.mark.parametrize("key", ["p", "2026-01-01T00", "a/b", "..", "é", None, "", 7, "x" * 400])
@pytest.mark.parametrize("root", [URL, "s3://lake", "file:///data/my%20lake"])
def test_what_is_granted_is_where_the_worker_writes(root: str, key: Any, by: str) -> None:
    definition = {"outputs": [{"name": "tidy", "partition_by": by}], "datasets": {"tidy": "u"}}
    task = claimed(definition=definition, payload={"partition_key": key})
    found = grants_of(task, Root.parse(root))
    places = AttemptPaths(root)
    place = places.output("tidy", generation=GENERATION, payload=task.payload, attempt_id=FOLDER)
    if by:
        place = places.many("tidy", generation=GENERATION, attempt_id=FOLDER)
    granted = [Scope.parse(each.prefix, schemes=("s3", "file")) for each in found.write]
    assert granted == [Scope.parse(f"{place}/", schemes=("s3", "file"))]
    scratch = f"{places.scratch(FOLDER)}/"
    assert Scope.parse(scratch, schemes=("s3", "file")) == Scope.parse(
        found.scratch, schemes=("s3", "file")
    )


def test_an_input_is_read_in_the_folders_of_its_parts() -> None:
    one, two = location("raw", "p", 1), location("raw", "p", 2)
    assert reads(raw=given_parts("raw", one, two, one)) == (
        ReadGrant(dataset="uuid of raw", version=FED, prefixes=(f"{one}/", f"{two}/")),
    )


def test_an_input_of_which_all_is_read_has_its_generation() -> None:
    definition = {"inputs": [{"from": "raw", "as": "old", "read": "all"}, {"from": "more"}]}
    inputs = {
        "old": given_parts("raw", location("raw", "a"), location("raw", "b")),
        "more": given_parts("more", location("more", "p")),
    }
    found = grants_of(claimed(inputs=inputs, definition=definition), ROOT)
    assert [each.prefixes for each in found.read] == [
        (f"{location('more', 'p')}/",),
        (f"{URL}/datasets/raw/{FED}/",),
    ]


def test_what_was_kept_of_an_earlier_generation_is_read_too() -> None:
    kept = location("raw", "a").replace(FED, GENERATION)
    definition = {"inputs": [{"from": "raw", "read": "all"}]}
    inputs = {"raw": given_parts("raw", location("raw", "b"), kept)}
    (found,) = grants_of(claimed(inputs=inputs, definition=definition), ROOT).read
    assert found.prefixes == (f"{URL}/datasets/raw/{FED}/", f"{kept}/")


def test_an_input_without_data_grants_nothing() -> None:
    assert reads(raw=given_parts("raw", location("raw", "p"), has_data=False)) == ()
    assert reads(raw=given_parts("raw")) == (ReadGrant(dataset="uuid of raw", version=FED),)


@pytest.mark.parametrize(
    "wrong",
    [
        "s3://other/one/datasets/raw/x/p/1-1-a",
        "s3://lake/two/datasets/raw/x/p/1-1-a",
        "s3://lake/one/datasets/rawer/x/p/1-1-a",
        f"{URL}/datasets/raw",
        f"{URL}/datasets",
        URL,
        "s3://lake",
        f"{URL}/datasets/raw/../other/x",
        f"{URL}/datasets/raw/%2e%2e/x",
        f"{URL}/datasets/raw//x",
        f"{URL}/datasets/raw/*",
        "file:///etc",
        "",
        None,
        7,
    ],
)
def test_what_is_not_below_its_own_dataset_is_not_granted(wrong: object) -> None:
    right = location("raw", "p")
    (found,) = reads(raw=given_parts("raw", wrong, right))
    assert (found.prefixes, found.omitted) == ((f"{right}/",), 1)


def test_more_folders_than_a_token_names_are_not_granted_at_all() -> None:
    most = [location("raw", str(number)) for number in range(FOLDERS_MAX)]
    (found,) = reads(raw=given_parts("raw", *most))
    assert (len(found.prefixes), found.omitted) == (FOLDERS_MAX, 0)
    (found,) = reads(raw=given_parts("raw", *most, location("raw", "more")))
    assert (found.prefixes, found.omitted) == ((), FOLDERS_MAX + 1)


def test_of_too_many_parts_only_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(text: str) -> Scope:
        read.append(text)
        return scope_of_location(text)

    monkeypatch.setattr("penstock.dispatcher.capabilities.tokens.scope_of_location", counted)
    for dataset in ("raw", "other"):
        read.clear()
        many = [location(dataset, str(number)) for number in range(10_000)]
        (found,) = reads(raw=given_parts("raw", *many))
        assert (found.prefixes, found.omitted) == ((), 10_000)
        assert len(read) == FOLDERS_MAX + 1


def test_the_longest_inputs_are_left_out_if_there_is_no_room_for_all() -> None:
    inputs = {
        "long": given_parts("long", *(location("long", "k" * 100 + str(n)) for n in range(32))),
        "longer": given_parts(
            "longer", *(location("longer", "k" * 120 + str(n)) for n in range(32))
        ),
        "short": given_parts("short", location("short", "p")),
    }
    found = {each.dataset: each for each in reads(**inputs)}
    assert (found["uuid of longer"].prefixes, found["uuid of longer"].omitted) == ((), 32)
    assert len(found["uuid of short"].prefixes) == 1
    named = sum(len(prefix) for each in found.values() for prefix in each.prefixes)
    assert named <= GRANTS_BYTES_MAX


@given(
    counts=st.lists(st.integers(0, 40), max_size=100),
    outputs=st.integers(0, 100),
    key=st.text(max_size=300),
)
def test_every_token_fits_into_a_header(counts: list[int], outputs: int, key: str) -> None:
    names = [f"d{number}" for number in range(outputs)]
    inputs = {
        f"i{place}": given_parts(
            f"i{place}", *(location(f"i{place}", f"{key}{n}") for n in range(count))
        )
        for place, count in enumerate(counts)
    }
    definition = {
        "outputs": [{"name": name} for name in names],
        "datasets": dict.fromkeys(names, GENERATION),
    }
    task = claimed(inputs=inputs, definition=definition, payload={"partition_key": key})
    claims = Claims(
        iss="penstock/default",
        aud=TASK_AUDIENCE,
        sub="task:7:2",
        iat=1,
        nbf=1,
        exp=2,
        jti="x" * 24,
        org="default",
        task_id=7,
        attempt=2,
        grants=grants_of(task, ROOT),
    )
    # All of the outputs of a job that is not out of the ordinary.
    assert len(claims.grants.write) == outputs or outputs > 20
    assert token_bytes(claims, kid="k" * 43) <= TOKEN_BYTES_MAX
