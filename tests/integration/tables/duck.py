"""A DuckDB that reads Iceberg: its extensions are wheels, and nothing is installed by itself."""

from __future__ import annotations

import importlib
from pathlib import Path

import duckdb


def folder_of(extension: str) -> Path:
    """Where the wheel of an extension of DuckDB has it."""
    module = importlib.import_module(f"duckdb_extension_{extension}")
    (found,) = Path(str(module.__file__)).parent.glob(f"extensions/*/{extension}.duckdb_extension")
    return found


def opened_duck(url: str = "") -> duckdb.DuckDBPyConnection:
    """A connection; with an address, `p` is the catalog there."""
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    for each in ("avro", "httpfs", "iceberg"):
        connection.execute(f"LOAD '{folder_of(each)}'")
    if url:
        attached = f"ATTACH '' AS p (TYPE iceberg, ENDPOINT '{url}/iceberg', TOKEN 'any')"
        connection.execute(attached)
    return connection
