"""Columns in Spark's words."""

from __future__ import annotations

import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.columns import columns_of


def test_a_column_without_a_type_is_refused_and_one_with_such_a_name_is_not() -> None:
    avoided = types.StructType([types.StructField("avoided", types.IntegerType())])
    (column,) = columns_of(types.StructType([types.StructField("a", avoided)]))
    assert column.type == "struct<avoided:int>"
    nothing = types.ArrayType(types.NullType())
    with pytest.raises(WorkFailed, match=r"'a' of the result has no type \(array<void>\)"):
        columns_of(types.StructType([types.StructField("a", nothing)]))


def test_a_type_of_users_is_called_what_its_files_have() -> None:
    (column,) = columns_of(types.StructType([types.StructField("v", VectorUDT())]))
    assert column.type == "struct<type:tinyint,size:int,indices:array<int>,values:array<double>>"
