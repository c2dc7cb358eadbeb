"""What a config may say, and that what is wrong with it is told with its field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest

from penstock.kernel.errors import WorkReleased
from penstock.runtimes.spark.job_config import (
    OPERATORS,
    RowCheck,
    RowCountCheck,
    UniqueCheck,
    config_faults,
    read_config,
)
from penstock.runtimes.user_code import FunctionReference


@pytest.mark.parametrize(
    ("operator", "config"),
    [
        ("spark.sql", {"sql": "SELECT 1"}),
        (
            "spark.sql",
            {"sql": "SELECT :n", "sql_file": "a.sql", "parameters": {"n": 1.5, "x": None}},
        ),
        ("spark.sql", {"sql": "SELECT 1", "partition_wise": True, "sort_by": ["a"]}),
        ("spark.python", {"transform": "a.b:c", "parameters": {"deep": {"list": [1]}}}),
        ("compact", {}),
        ("compact", {"target_file_bytes": "128MiB"}),
        ("compact", {"target_file_bytes": 1_000_000}),
        ("integrity_check", {"expect": [{"check": "a > 0", "name": "n", "at_most": "0.1%"}]}),
        ("integrity_check", {"expect": [{"unique": ["a"]}, {"rows": {"max": 5}}]}),
        ("rollup", {}),
        ("rollup", {"by": ["a"], "measures": {"n": "count(*)"}}),
        ("rollup", {"measures": {"n": "count(*)"}}),
    ],
)
def test_what_is_right_has_no_faults(operator: str, config: Mapping[str, Any]) -> None:
    assert list(config_faults(operator, config)) == []
    assert read_config(operator, config).operator == operator


@pytest.mark.parametrize(
    ("operator", "config", "field", "words"),
    [
        ("spark.scala", {}, "operator", "it has no 'spark.scala'"),
        ("spark.sql", {}, "config.sql", "needs sql"),
        ("spark.sql", {"sql": " -- nothing\n ; /* here */"}, "config.sql", "no SQL in it"),
        ("spark.sql", {"sql": 5}, "config.sql", "no SQL in it"),
        ("spark.sql", {"sql_file": "a.sql"}, "config.sql_file", "text of 'a.sql' is not here"),
        ("spark.sql", {"sql": "", "sql_file": "a.sql"}, "config.sql_file", "no SQL in it"),
        ("spark.sql", {"sql": "x", "sql_file": ""}, "config.sql_file", "name of a file"),
        ("spark.sql", {"sql": "x", "query": 1}, "config.query", "no field 'query'"),
        ("spark.sql", {"sql": "x", "sort": []}, "config.sort", "Did you mean sort_by?"),
        ("spark.sql", {"sql": "x", "parameters": [1]}, "config.parameters", "names and values"),
        ("spark.sql", {"sql": "x", "parameters": {"a b": 1}}, "config.parameters", "':name'"[1:-1]),
        (
            "spark.sql",
            {"sql": "x", "parameters": {"end": 1}},
            "config.parameters.end",
            "of its own",
        ),
        ("spark.sql", {"sql": "x", "parameters": {"a": [1]}}, "config.parameters.a", "a number"),
        (
            "spark.sql",
            {"sql": "SELECT :start", "partition_wise": True},
            "config.partition_wise",
            "Use the column _partition",
        ),
        ("spark.python", {}, "config.transform", "module:function"),
        ("spark.python", {"transform": "a.b"}, "config.transform", "module:function"),
        ("compact", {"partition_wise": True}, "config.partition_wise", "by itself"),
        ("compact", {"partition_wise": 1}, "config.partition_wise", "true or false"),
        ("compact", {"sql": "x"}, "config.sql", "compact has no field 'sql'"),
        ("compact", {"target_file_bytes": "big"}, "config.target_file_bytes", "128MiB"),
        ("compact", {"target_file_bytes": 5}, "config.target_file_bytes", "64KiB or more"),
        ("compact", {"sort_by": "a"}, "config.sort_by", "list of columns"),
        ("compact", {"sort_by": ["a", "a"]}, "config.sort_by", "twice"),
        ("compact", {"cluster_by": []}, "config.cluster_by", "list of columns"),
        ("compact", {"sort_by": ["a"], "cluster_by": ["b"]}, "config.cluster_by", "not both"),
        ("rollup", {"by": ["a"]}, "config.measures", "what to compute"),
        ("rollup", {"measures": {}}, "config.measures", "names and SQL"),
        ("rollup", {"measures": {"n": ""}}, "config.measures.n", "aggregate in SQL"),
        ("rollup", {"by": [], "measures": {"n": "x"}}, "config.by", "list of columns"),
        ("integrity_check", {}, "config.expect", "needs a list"),
        ("compact", {"expect": {}}, "config.expect", "Write a list"),
        ("compact", {"expect": ["a > 0"]}, "config.expect[0]", "{check:"),
        ("compact", {"expect": [{"check": "a", "rows": {}}]}, "config.expect[0]", "{check:"),
        ("compact", {"expect": [{"check": ""}]}, "config.expect[0].check", "predicate in SQL"),
        ("compact", {"expect": [{"check": "a", "at": 1}]}, "config.expect[0].at", "no field"),
        (
            "compact",
            {"expect": [{"check": "a", "at_most": "5"}]},
            "config.expect[0].at_most",
            "as in 0.1%",
        ),
        (
            "compact",
            {"expect": [{"check": "a", "at_most": "200%"}]},
            "config.expect[0].at_most",
            "as in 0.1%",
        ),
        ("compact", {"expect": [{"unique": []}]}, "config.expect[0].unique", "list of columns"),
        ("compact", {"expect": [{"rows": {"least": 1}}]}, "config.expect[0].rows", "{min: 1}"),
        ("compact", {"expect": [{"rows": {"min": -1}}]}, "config.expect[0].rows.min", "whole"),
        (
            "compact",
            {"expect": [{"rows": {"min": 2, "max": 1}}]},
            "config.expect[0].rows",
            "min is more than max",
        ),
        ("compact", {"expect": [{"rows": {"min": 1}, "name": 5}]}, "config.expect[0].name", "text"),
    ],
)
def test_what_is_wrong_is_told_with_its_field(
    operator: str, config: Mapping[str, Any], field: str, words: str
) -> None:
    faults = list(config_faults(operator, config))
    assert [fault.field for fault in faults] == [field]
    assert words in faults[0].message
    assert faults[0].message.endswith((".", "?"))
    with pytest.raises(WorkReleased, match=re.escape(faults[0].message)):
        read_config(operator, config)


def test_a_config_is_read() -> None:
    config = {
        "transform": "flights:clean",
        "parameters": {"n": 1},
        "sort_by": ["a", "b"],
        "target_file_bytes": "1MiB",
        "expect": [
            {"check": "a > 0", "at_most": "0.5%"},
            {"check": "b > 0", "at_most": 3, "name": "few"},
            {"unique": ["a", "b"]},
            {"rows": {"min": 1, "max": 9}},
        ],
    }
    read = read_config("spark.python", config)
    assert read.transform == FunctionReference("flights", "clean")
    assert read.target_file_bytes == 2**20
    assert read.expect == (
        RowCheck(sql="a > 0", share_max=Decimal("0.005")),
        RowCheck(sql="b > 0", name="few", rows_max=3),
        UniqueCheck(columns=("a", "b")),
        RowCountCheck(least=1, most=9),
    )
    assert read.expect[3].title == "at least 1 and at most 9 rows"


def test_a_share_of_rows_is_exact() -> None:
    check = RowCheck(sql="a", share_max=Decimal("0.001"))
    assert check.allows(failed=1, rows=1000)
    assert not check.allows(failed=1, rows=999)
    assert check.allows(failed=0, rows=0)


def test_there_are_five_operators() -> None:
    assert OPERATORS == ("spark.sql", "spark.python", "compact", "integrity_check", "rollup")
