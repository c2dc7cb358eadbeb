"""What a job may ask for of its own Spark, and what its host is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.runtimes.spark.settings import (
    SparkSettings,
    classic_conf,
    connect_conf,
    profile,
    profile_faults,
)

HERE = SparkSettings(conf={"spark.a": "1", "spark.jars.packages": "a:b:1"})
CLUSTER = SparkSettings(master="spark://h:7077", conf={"spark.archives": "x.zip"})


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"gpu": 1}, "gpu", "memory, cpu, conf, packages and python"),
        ({"memory": "1MiB"}, "memory", "512MiB or more"),
        ({"memory": "much"}, "memory", "8GiB"),
        ({"cpu": 0.5}, "cpu", "as in 4"),
        ({"cpu": True}, "cpu", "as in 4"),
        ({"conf": ["spark.a"]}, "conf", "settings of Spark"),
        ({"conf": {"a.b": "1"}}, "conf", "'a.b' is no setting of Spark"),
        ({"conf": {"spark.a": [1]}}, "conf", "spark.a is no text and no number"),
        ({"conf": {"spark.driver.memory": "1g"}}, "conf", "Write resources.memory"),
        (
            {"conf": {"spark.master": "local"}},
            "conf",
            "spark.master is for whoever runs the workers",
        ),
        ({"conf": {"spark.authenticate": False}}, "conf", "in their settings"),
        ({"packages": ["postgresql"]}, "packages", "Maven packages"),
        ({"packages": "a:b:1"}, "packages", "a list"),
        ({"python": "a.zip,b.zip"}, "python", "env.tar.gz"),
    ],
)
def test_what_cannot_be_asked_for_is_told_with_its_field(
    asked: dict[str, Any], field: str, words: str
) -> None:
    [fault] = profile_faults(asked, runtime="spark")
    assert fault.field == f"resources.{field}"
    assert words in fault.message
    with pytest.raises(WorkReleased, match=f"resources.{field}"):
        profile(HERE, asked)


def test_nothing_asked_for_is_the_host_of_all() -> None:
    assert profile(HERE, {}) is HERE
    assert profile(HERE, {"queue": "big"}) is HERE


def test_on_this_machine_it_is_the_jvm_that_is_sized() -> None:
    asked = {
        "memory": "8GiB",
        "cpu": 4,
        "conf": {"spark.b": True, "spark.a": 2},
        "packages": ["c:d:2", "a:b:1"],
        "python": "/opt/python",
    }
    found = profile(HERE, asked)
    assert (found.master, found.driver_memory) == ("local[4]", "8192m")
    assert found.conf == {
        "spark.a": "2",
        "spark.b": "true",
        "spark.jars.packages": "a:b:1,c:d:2",
        "spark.pyspark.python": "/opt/python",
    }


def test_on_a_cluster_it_is_an_executor(tmp_path: Path) -> None:
    (tmp_path / "env.tar.gz").touch()
    settings = SparkSettings(master="spark://h:7077", conf=CLUSTER.conf, path=(str(tmp_path),))
    found = profile(settings, {"memory": "2GiB", "cpu": 3, "python": "env.tar.gz"})
    assert (found.master, found.driver_memory) == (settings.master, settings.driver_memory)
    assert found.conf == {
        "spark.archives": f"x.zip,{tmp_path}/env.tar.gz#penstock_python",
        "spark.pyspark.python": "./penstock_python/bin/python",
        "spark.executor.memory": "2048m",
        "spark.executor.cores": "3",
    }


def test_an_archive_is_for_executors_and_has_to_be_there() -> None:
    with pytest.raises(WorkFailed, match="write the path of an interpreter"):
        profile(HERE, {"python": "env.zip"})
    with pytest.raises(WorkReleased, match=r"no env\.zip on this worker"):
        profile(CLUSTER, {"python": "env.zip"})
    there = profile(CLUSTER, {"python": "s3a://b/env.zip"})
    assert there.conf["spark.archives"] == "x.zip,s3a://b/env.zip#penstock_python"
    own = profile(CLUSTER, {"python": "s3a://b/env.zip", "conf": {"spark.archives": "own.zip"}})
    assert own.conf["spark.archives"] == "own.zip,s3a://b/env.zip#penstock_python"


def test_a_job_brings_a_connect_server_settings_of_its_session_only() -> None:
    settings = SparkSettings(master="sc://h")
    assert profile(settings, {"conf": {"spark.a": 1}}).conf == {"spark.a": "1"}
    with pytest.raises(WorkFailed, match=r"resources\.memory: of a Connect server"):
        profile(settings, {"memory": "1GiB"})


def test_what_a_runtime_gives_holds_where_a_job_says_nothing() -> None:
    settings = SparkSettings(resources={"memory": "4GiB", "cpu": 2})
    found = profile(settings, {"cpu": 1})
    assert (found.master, found.driver_memory) == ("local[1]", "4096m")


def test_executors_of_a_cluster_come_and_go_unless_the_settings_say_otherwise() -> None:
    name = "spark.dynamicAllocation.enabled"
    assert classic_conf(CLUSTER, folder="f", cores=2)[name] == "true"
    assert name not in classic_conf(HERE, folder="f", cores=2)
    fixed = SparkSettings(master="spark://h:7077", conf={name: "false"})
    assert classic_conf(fixed, folder="f", cores=2)[name] == "false"


def test_nothing_that_has_ended_holds_an_executor_for_good() -> None:
    found = classic_conf(CLUSTER, folder="f", cores=2)
    for name in ("shuffleTracking.timeout", "cachedExecutorIdleTimeout"):
        assert found[f"spark.dynamicAllocation.{name}"].endswith("0s")


def test_files_have_field_ids_whatever_is_said() -> None:
    name = "spark.sql.parquet.fieldId.write.enabled"
    said = SparkSettings(conf={name: "false"})
    assert classic_conf(said, folder="f", cores=2)[name] == connect_conf(said)[name] == "true"
