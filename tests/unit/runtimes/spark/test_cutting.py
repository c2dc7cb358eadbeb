"""How many files a result becomes, and which of them are splinters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.manifest import File
from penstock.runtimes.spark.result_size import UNKNOWN_BYTES, files_for, misfits, splinters

MIB = 2**20
TARGET = 128 * MIB


def files(sizes: Sequence[int]) -> list[File]:
    return [
        File(name=f"part-{number}", rows=1, bytes=size, sha256="0")
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 1),
        (40 * MIB, 1),
        (70 * MIB, 2),
        (TARGET, 4),
        (5 * TARGET + 1, 6),
        (UNKNOWN_BYTES, 32),
        (UNKNOWN_BYTES + 5, 32),
    ],
)
def test_files_are_of_the_target_size_and_a_few_where_one_would_do(size: int, count: int) -> None:
    assert files_for(size, file_bytes=TARGET) == count


@pytest.mark.parametrize(
    ("sizes", "put_together"),
    [
        ([], 0),
        ([1_600] * 200, 200),
        ([1_600] * 3, 0),
        ([20 * MIB] * 200, 0),
        # A frequent value: one file is large, and stays.
        ([3 * TARGET] + [1_600] * 199, 199),
        # Four times fewer, or not at all.
        ([15 * MIB] * 16, 16),
        ([15 * MIB] * 8, 0),
    ],
)
def test_splinters_are_put_together_where_that_helps(
    sizes: Sequence[int], put_together: int
) -> None:
    assert len(splinters(files(sizes), file_bytes=TARGET)) == put_together


@pytest.mark.parametrize(
    ("sizes", "again", "sorted_again"),
    [
        ([], 0, 0),
        ([4 * TARGET], 0, 0),
        ([4 * TARGET + 1], 1, 1),
        ([TARGET] * 9 + [5 * TARGET], 1, 0),
        ([5 * TARGET] * 32, 32, 32),
        # What is large is cut, and the small are put together.
        ([5 * TARGET] + [1_600] * 9, 10, 10),
    ],
)
def test_files_far_from_the_target_are_written_again(
    sizes: Sequence[int], again: int, sorted_again: int
) -> None:
    assert len(misfits(files(sizes), file_bytes=TARGET)) == again
    assert len(misfits(files(sizes), file_bytes=TARGET, is_sorted=True)) == sorted_again


@given(st.lists(st.integers(1, 2 * TARGET), max_size=300))
def test_splinters_are_small_and_become_few(sizes: Sequence[int]) -> None:
    found = splinters(files(sizes), file_bytes=TARGET)
    assert all(each.bytes < TARGET // 8 for each in found)
    count = files_for(sum(each.bytes for each in found), file_bytes=TARGET)
    assert not found or count * 4 <= len(found)
