"""Brings the tables of TPC-H into datasets: what `load` in the benchmark's DAG calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TABLES = ("customer", "lineitem", "nation", "orders", "region", "supplier")


def load(_inputs: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Every table as it was generated."""
    folder = context.parameters["folder"]
    return {each: context.session.read.parquet(f"{folder}/{each}.parquet") for each in TABLES}
