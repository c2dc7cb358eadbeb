"""The settings of the runtime spark, and what Spark is told because of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.spark.result_size import collected_bytes_max, gathered_bytes_max
from penstock.runtimes.spark.settings import (
    SparkSettings,
    classic_conf,
    connect_conf,
    environment,
    heap_bytes,
    java_options,
    python_of,
    read_spark_settings,
)


def test_sizes_are_read_as_people_write_them() -> None:
    settings = read_spark_settings({"cache_bytes_max": "2GiB", "arrow_bytes_max": "0"})
    assert (settings.cache_bytes_max, settings.arrow_bytes_max) == (2 * 2**30, 0)
    assert heap_bytes("600m") == 600 * 2**20
    assert read_spark_settings({"driver_memory": "3g"}).resident_bytes_max == 5 * 2**30
    assert read_spark_settings({"recycle_bytes": "1GiB"}).resident_bytes_max == 2**30


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"master": ""}, "'master' in the settings of the runtime spark is empty."),
        ({"cache_bytes_max": "much"}, "'cache_bytes_max' in the settings of the runtime spark"),
        ({"driver_memory": "2GiB"}, "'driver_memory' in the settings"),
        ({"paralel": 3}, "paralel"),
        ({"parallel": 0}, "'parallel' in the settings"),
    ],
)
def test_wrong_settings_are_one_sentence(said: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_spark_settings(said)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("master", "is_local", "is_connect", "is_loopback"),
    [
        ("local[*]", True, False, True),
        ("spark://somewhere:7077", False, False, False),
        ("spark://127.0.0.1:7077", False, False, True),
        ("k8s://https://somewhere", False, False, False),
        ("sc://somewhere", False, True, False),
    ],
)
def test_only_a_master_on_this_machine_is_told_to_stay_there(
    master: str, is_local: bool, is_connect: bool, is_loopback: bool
) -> None:
    settings = SparkSettings(master=master)
    assert (settings.is_local, settings.is_connect) == (is_local, is_connect)
    said = classic_conf(settings, folder="/data/host", cores=2)
    assert (said.get("spark.driver.host") == "127.0.0.1") is is_loopback
    assert ("spark.sql.shuffle.partitions" in said) is is_local
    # Elsewhere it is the cluster that has the secret.
    assert (said.get("spark.authenticate") == "true") is is_local
    said = environment(settings, {"LANG": "de_DE.utf8"}, folder="/data/host")
    assert ("SPARK_LOCAL_IP" in said) is is_loopback
    assert ("SPARK_LOCAL_DIRS" in said) is master.startswith(("local", "spark://"))


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({}, "C.UTF-8"),
        ({"LANG": "de_DE.UTF-8"}, None),
        ({"LC_CTYPE": "C.utf8"}, None),
        ({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, "C.UTF-8"),
        ({"LC_ALL": "", "LANG": "de_DE.ISO-8859-1"}, "C.UTF-8"),
    ],
)
def test_java_has_a_locale_whose_file_names_are_utf_8(
    ours: Mapping[str, str], said: str | None
) -> None:
    assert environment(SparkSettings(), ours, folder="/f").get("LC_ALL") == said


def test_what_spark_cannot_authenticate_by_itself_is_left_to_the_user() -> None:
    pretended = classic_conf(SparkSettings(master="local-cluster[2,1,512]"), folder="/f", cores=2)
    refused = SparkSettings(conf={"spark.authenticate": "false"})
    for said in (pretended, classic_conf(refused, folder="/f", cores=2)):
        # Spark does not start with encryption alone.
        assert "spark.network.crypto.enabled" not in said


def test_shuffles_are_cut_finely_and_joined_where_plans_are_adapted() -> None:
    cut, known = (
        "spark.sql.adaptive.coalescePartitions.initialPartitionNum",
        "spark.sql.shuffle.partitions",
    )
    said = classic_conf(SparkSettings(), folder="/f", cores=2)
    assert (said[cut], said[known]) == ("200", "4")
    # What Spark is told by a user is not overridden by what only we would say.
    theirs = classic_conf(SparkSettings(conf={known: "8"}), folder="/f", cores=2)
    assert (cut in theirs, theirs[known]) == (False, "8")
    assert cut not in classic_conf(SparkSettings(master="spark://h:7077"), folder="/f", cores=2)


@pytest.mark.parametrize(
    ("master", "is_sorted"), [("local[2]", False), ("local-cluster[2,1,512]", True)]
)
def test_rows_that_are_dealt_out_are_sorted_first_where_an_executor_may_be_lost(
    master: str, is_sorted: bool
) -> None:
    said = classic_conf(SparkSettings(master=master), folder="/f", cores=2)
    name = "spark.sql.execution.sortBeforeRepartition"
    assert (said.get(name, "true") == "true") is is_sorted


@pytest.mark.parametrize(
    ("memory", "parallel", "mib"), [("2g", 4, 128), ("2g", 1, 512), ("600m", 2, 75), ("1g", 64, 32)]
)
def test_results_of_the_tasks_that_run_at_once_fit_the_heap(
    memory: str, parallel: int, mib: int
) -> None:
    settings = SparkSettings(driver_memory=memory, parallel=parallel)
    said = classic_conf(settings, folder="/d", cores=8)
    assert said["spark.driver.maxResultSize"] == f"{mib * 2**20}b"


def test_what_is_collected_is_bounded_by_the_heap_and_by_no_cores() -> None:
    def bounds(**said: Any) -> tuple[int, ...]:
        settings = SparkSettings(**said)
        gathered = (gathered_bytes_max(settings, cores=cores) for cores in (2, 8, 64))
        return (collected_bytes_max(settings), *gathered)

    mib = 2**20
    assert bounds() == (64 * mib, 64 * mib, 32 * mib, 4 * mib)
    assert bounds(driver_memory="512m")[0] == 16 * mib
    assert bounds(parallel=16)[0] == 16 * mib
    assert bounds(arrow_bytes_max=mib) == (mib, mib, mib, mib)
    assert bounds(master="sc://s", driver_memory="1m") == (64 * mib,) * 4


def test_the_users_own_conf_wins() -> None:
    settings = SparkSettings(
        conf={"spark.sql.session.timeZone": "Asia/Tokyo", "spark.local.dir": "/mnt"}
    )
    assert classic_conf(settings, folder="/f", cores=2)["spark.sql.session.timeZone"] == (
        "Asia/Tokyo"
    )
    assert connect_conf(settings)["spark.sql.session.timeZone"] == "Asia/Tokyo"
    assert "SPARK_LOCAL_DIRS" not in environment(settings, {"LANG": "de_DE.utf8"}, folder="/f")
    assert connect_conf(SparkSettings())["spark.sql.session.timeZone"] == "UTC"


def test_the_jvm_ends_when_it_is_out_of_memory_and_tiny_tasks_have_their_own_flag() -> None:
    plain = java_options(SparkSettings(), log_config="/f/log4j2", archive="", temporary="/f")
    assert "-XX:+ExitOnOutOfMemoryError" in plain
    assert not [option for option in plain if "Tiered" in option or "Shared" in option]
    tiny = java_options(
        SparkSettings(tiny=True), log_config="/f/log4j2", archive="/a.jsa", temporary="/f"
    )
    assert "-XX:TieredStopAtLevel=1" in tiny
    assert "-XX:SharedArchiveFile=/a.jsa" in tiny


def test_executors_have_the_python_that_was_asked_for() -> None:
    asked = SparkSettings(conf={"spark.pyspark.python": "./env/bin/python"})
    theirs = {"PYSPARK_PYTHON": "/opt/python"}
    assert python_of(asked, theirs, running="/this/python") == "./env/bin/python"
    assert python_of(SparkSettings(), theirs, running="/this/python") == "/opt/python"
    assert python_of(SparkSettings(), {}, running="/this/python") == "/this/python"
