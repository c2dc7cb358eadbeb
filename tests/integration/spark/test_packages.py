"""Packages that a job asks for are really fetched: from a Maven repository in a folder."""

from __future__ import annotations

import asyncio
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.testing.runtime_contract import RecordingReporter
from tests.integration.spark.bench import Bench
from tests.integration.spark.trial import spark_settings

GROUP = "org.example.penstock"
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>{group}</groupId><artifactId>{name}</artifactId><version>1.0</version>
<dependencies>{needs}</dependencies>
</project>"""
NEEDS = (
    "<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
    "<version>1.0</version></dependency>"
)


def publish(repository: Path, name: str, *, needs: str = "") -> None:
    """A package with one file in it, by its name."""
    folder = repository.joinpath(*GROUP.split("."), name, "1.0")
    folder.mkdir(parents=True)
    needed = NEEDS.format(group=GROUP, name=needs) if needs else ""
    pom = POM.format(group=GROUP, name=name, needs=needed)
    (folder / f"{name}-1.0.pom").write_text(pom)
    with zipfile.ZipFile(folder / f"{name}-1.0.jar", "w") as jar:
        jar.writestr(f"{name}.txt", "there")


def look(inputs: Any, context: Any) -> Any:
    """A transform that says which of the files its JVM has, and whether it has our jar as well."""
    del inputs
    loader = context.session._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    names = ("driver.txt", "needed.txt", "other.txt", "penstock/spark/Buckets.class")
    found = [name for name in names if loader.getResource(name) is not None]
    return context.session.createDataFrame([(each,) for each in found], "name string")


@pytest.mark.timeout(300)
def test_a_package_is_there_with_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the worker's environment says of Connect makes no client of a host.
    monkeypatch.setenv("SPARK_REMOTE", "sc://nowhere")
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    repository = tmp_path / "repository"
    publish(repository, "driver", needs="needed")
    publish(repository, "needed")
    publish(repository, "other")
    bench = Bench(None, tmp_path / "root", tmp_path, master="spark://nowhere:7077")
    work = bench.work(
        "spark.python",
        {"transform": f"{__name__}:look"},
        resources={
            "packages": [f"{GROUP}:driver:1.0"],
            "conf": {
                "spark.jars.repositories": repository.as_uri(),
                "spark.jars.ivy": str(tmp_path / "ivy"),
            },
        },
    )

    async def run() -> None:
        async with SparkRuntime(spark_settings(tmp_path)) as runtime:
            [made] = (await runtime.run(work, RecordingReporter())).made
            names = [row["name"] for row in bench.rows(made)]
            assert names == ["driver.txt", "needed.txt", "penstock/spark/Buckets.class"]

    asyncio.run(run())
