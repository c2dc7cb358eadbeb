"""Spark skips neither NaN nor a zero of the other sign in files that were written through Arrow."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from penstock.datasets.snapshot import files, read
from penstock.runtimes.spark.access.base import FileSlice
from penstock.runtimes.spark.access.folder import FolderAccess
from tests.integration.spark.bench import Bench


@pytest.mark.timeout(300)
def test_no_row_is_skipped_by_what_a_footer_says_of_fractions(bench: Bench, spark: Any) -> None:
    for values, asked in [
        ([float("nan"), 0.1], {"f > 0.5": [1], "f = double('nan')": [1], "f <> 0.1": [1]}),
        ([-0.0, -0.0], {"f = 0.0": [1, 2], "f >= 0.0D": [1, 2]}),
        ([0.0, 0.0], {"f = -0.0D": [1, 2], "f <= -0.0D": [1, 2]}),
    ]:
        contents = read([bench.publish({"k": [1, 2], "f": values})], bench.transfer)
        with ExitStack() as held:
            slices = [FileSlice(files=files(contents))]
            frame = FolderAccess(bench.transfer).frame(spark, slices, contents[0].columns, held)
            for one, found in asked.items():
                assert [row.k for row in frame.where(one).collect()] == found, one
