"""What is used of PySpark beyond what it promises is there, or is named when a host starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession, types
from pyspark.sql.catalog import Catalog
from pyspark.sql.pandas import types as arrow_types

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark import internals


def test_this_release_has_all_of_it(spark: Any) -> None:
    internals.check_driver(spark)


def test_what_a_release_lacks_is_named_with_it(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(scala: Any) -> Any:
        return scala.statusStoreOfAnotherName()

    monkeypatch.setattr(internals, "status_store", gone)
    monkeypatch.setattr(arrow_types, "to_arrow_schema", lambda _schema, *, zone: zone)
    with pytest.raises(WorkFailed) as caught:
        internals.check_driver(spark)
    assert caught.value.message.startswith(
        f"PySpark {pyspark.__version__} cannot be used: it lacks to_arrow_schema,"
        " collectAsArrowToPython, statusStore.job, statusStore.lastStageAttempt, or has it in"
        " another form."
    )
    assert not caught.value.is_retried


def test_what_keeps_jobs_apart_is_tried(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Any, kind: str, name: str) -> None:
        del kind, name
        self._catalog.dropByAnotherName()

    monkeypatch.setattr(internals.SharedState, "drop", gone)
    monkeypatch.delattr(Catalog, "__init__")
    with pytest.raises(
        WorkFailed, match=r"lacks sharedState\.externalCatalog\.drop, Catalog\._spa"
    ):
        internals.check_driver(spark)


def test_what_prunes_files_and_commits_writes_is_tried(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "_FILTER", "Filter of another name")
    # A class of the jar that is no protocol of Spark's.
    monkeypatch.setattr(internals, "COMMIT_PROTOCOL", "penstock.spark.Damaged")
    with pytest.raises(WorkFailed, match=r"lacks optimizedPlan\.toJSON, FileCommitProtocol, or"):
        internals.check_driver(spark)


def test_what_a_client_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        class client:  # noqa: N801 - PySpark calls it so
            set_retry_policies = interrupt_tag = to_table_as_iterator = None

        builder = SparkSession.builder
        catalog = SimpleNamespace(_sparkSession=None)

    internals.check_client(Session)
    monkeypatch.delattr(Session.client, "interrupt_tag")
    with pytest.raises(WorkFailed, match=r"it lacks client\.interrupt_tag, or"):
        internals.check_client(Session)


def test_instants_are_in_utc_on_every_release() -> None:
    schema = types.StructType(
        [
            types.StructField("at", types.TimestampType()),
            types.StructField("local", types.TimestampNTZType()),
        ]
    )
    assert [str(each) for each in internals.arrow_schema(schema).types] == [
        "timestamp[us, tz=UTC]",
        "timestamp[us]",
    ]
