"""Names of everything that datasets are made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.dispatcher
from penstock.datasets import layout
from penstock.datasets.layout import AttemptOf, attempt_name, attempt_of, part, place_of
from penstock.store.base import check_key

NAME = attempt_name(task_id=42, attempt=3, lease_token="one")
GENERATION = "0b6a5b0e-3f9e-4a0e-8d52-0f4f7d2b9a11"


@given(st.text(max_size=60), st.text(max_size=60))
def test_two_texts_never_share_a_name(one: str, other: str) -> None:
    assert (part(one) == part(other)) == (one == other)


@given(st.text(min_size=1, max_size=400))
def test_a_name_is_one_part_of_a_portable_key(text: str) -> None:
    written = part(text)
    assert re.fullmatch(r"[A-Za-z0-9_=~-][A-Za-z0-9_.=~-]*", written)
    assert len(written) <= 150
    assert written != layout.WHOLE
    assert ".." not in written
    check_key(f"{layout.DATASETS}{written}/{layout.CURRENT}")


def test_long_texts_are_cut_and_stay_different() -> None:
    one, other = part("x" * 500 + "a"), part("x" * 500 + "b")
    assert one[:100] == other[:100]
    assert one != other


def test_the_name_of_an_attempt_says_whose_it_is() -> None:
    assert NAME.startswith("42-3-")
    assert attempt_of(NAME) == AttemptOf(42, 3)
    assert attempt_name(task_id=42, attempt=3, lease_token="other") != NAME
    # Whoever knows the fence knows the folder, and not the other way round.
    assert attempt_name(task_id=42, attempt=3, lease_token="one") == NAME
    assert "one" not in NAME


@pytest.mark.parametrize(
    "name",
    [
        "",
        "current.json",
        "42-3",
        "042-3-" + "a" * 24,
        "0-1-" + "a" * 24,
        "42-3-" + "a" * 23,
        "42-3-" + "a" * 25,
        "42-3-" + "A" * 24,
        "42-3-" + "a" * 24 + "\n",
        "-42-3-" + "a" * 24,
        "1" * 20 + "-3-" + "a" * 24,
        "a" * 24,
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert attempt_of(name) is None


@pytest.mark.parametrize(
    "root", ["file:///srv/a", "s3://bucket", "s3://b/datasets/x/y/z", "s3://b/x"]
)
@pytest.mark.parametrize("dataset", ["sales", "datasets", "a/b"])
@pytest.mark.parametrize("below", ["", "/", "/deep/er/part-1.parquet", "/datasets/a/b/c/d"])
def test_a_place_is_found_however_the_root_is_spelt(root: str, dataset: str, below: str) -> None:
    prefix = layout.attempt_prefix(
        dataset, generation=GENERATION, partition_key="2013-01-01", attempt=NAME
    )
    place = place_of(f"{root}/{prefix}{below}")
    assert place == f"{part(dataset)}/{GENERATION}/2013-01-01/{NAME}"


@pytest.mark.parametrize(
    "location",
    [
        "range:1",
        "s3://bucket/elsewhere/file.csv",
        f"s3://bucket/datasets/sales/{GENERATION}/x/current.json",
        f"s3://bucket/datasets/sales/{GENERATION}/x/{NAME}longer",
        f"s3://bucket/scratch/{NAME}",
    ],
)
def test_what_is_in_no_attempts_folder_has_no_place(location: str) -> None:
    assert place_of(location) is None


@pytest.mark.parametrize("escaped", ["=~", "%3D%7E", "%3d%7e"])
def test_a_place_is_found_though_it_is_escaped(escaped: str) -> None:
    location = f"file:///srv/datasets/d/{GENERATION}/day{escaped}2F/{NAME}/x"
    assert place_of(location) == f"d/{GENERATION}/day=~2F/{NAME}"


def test_what_a_path_says_of_itself_is_its_place() -> None:
    prefix = layout.attempt_prefix(
        "a b", generation=GENERATION, partition_key="day=1/~ü.x", attempt=NAME
    )
    assert place_of(Path(f"/srv/my data/{prefix}").as_uri()) == prefix.removeprefix("datasets/")


def test_the_database_finds_places_by_the_same_pattern() -> None:
    sql = Path(penstock.dispatcher.__file__).parent / "sql" / "0016_many_partitions.sql"
    # A text in two lines is one to Postgres.
    plain = re.sub(r"'\s*\n\s*'", "", sql.read_text())
    patterns = re.findall(r"FROM '(/datasets/[^']*)'\)", plain)
    ours = layout._PLACE.pattern.replace(r"\Z", "$")
    assert patterns == [ours]


def test_one_of_many_partitions_has_a_place_of_its_own() -> None:
    prefix = layout.many_prefix("d", generation=GENERATION, attempt=NAME)
    place = place_of(f"s3://b/{prefix}/{part('a/b')}/part-0.parquet")
    assert place == f"d/{GENERATION}/~many/{NAME}/a~2Fb"
    assert layout.attempt_of_place(place) == attempt_of(NAME)
    assert layout.attempt_of_place(NAME) == attempt_of(NAME)
    # A key that says so is another folder.
    assert part("~many") != layout.MANY
    named = layout.attempt_prefix("d", generation=GENERATION, partition_key="~many", attempt=NAME)
    assert place_of(f"s3://b/{named}/x") == named.removeprefix("datasets/")


def test_keys() -> None:
    assert layout.dataset_current_key("a b") == "datasets/a~20b/current.json"
    whole = layout.partition_current_key("a", generation="g", partition_key=None)
    assert whole == layout.partition_current_key("a", generation="g", partition_key="")
    assert whole == "datasets/a/g/~all/current.json"
    assert layout.partition_current_key("a", generation="g", partition_key="~all") != whole
    assert layout.scratch_prefix("1-1-x") == "scratch/1-1-x"
