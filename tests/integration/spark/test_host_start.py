"""How a JVM is started: by a packaged Java, with an archive of classes, and without one that fits.

Starting a JVM takes seconds, so each test here is about several things.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.spark import runtime as runtime_module
from penstock.runtimes.spark.java import archive_of, find_java, packaged_java
from tests.integration.spark.trial import Trial, a_moment, spark_runtime, spark_settings, until


@pytest.mark.timeout(300)
def test_a_java_without_a_module_serves_and_an_archive_that_does_not_fit_is_no_harm(
    tmp_path: Path,
) -> None:
    packaged = packaged_java()
    assert packaged is not None
    said = {"java": str(packaged), "archive": True, "tiny": True}
    try:
        java = find_java(str(packaged), {})
    except InvalidInput as error:
        pytest.skip(error.message)  # PySpark 4.1, and the one that is pinned is too new for it.
    archive = archive_of(spark_settings(tmp_path, **said), java)
    assert archive.path is not None
    archive.path.parent.mkdir(parents=True)
    archive.path.write_bytes(b"this is no archive" * 1000)
    runtime = spark_runtime(tmp_path, **said)

    async def test(trial: Trial) -> None:
        async with runtime:
            assert (await trial.run(trial.work("count", rows=10))).metrics["rows"] == 10
            assert runtime.hosts is not None
            [host] = runtime.hosts.hosts
            assert host.ready is not None
            assert host.ready.java == java.version
            assert host.ready.is_archived

    with asyncio.Runner() as runner:
        runner.run(test(Trial(tmp_path, runner, runtime)))


@pytest.mark.timeout(500)
def test_an_archive_is_made_when_a_host_is_idle_and_the_next_host_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "_ARCHIVE_IDLE_SECONDS", 0.0)
    settings = spark_settings(tmp_path, archive=True)
    java = find_java("", os.environ, packaged=packaged_java())
    archive = archive_of(settings, java).path
    assert archive is not None
    runtime = spark_runtime(tmp_path, archive=True)

    async def test(trial: Trial) -> None:
        async with runtime:
            runtime.expect()
            for _ in range(4):
                try:
                    await until(archive)
                    break
                except AssertionError:
                    continue
            assert archive.stat().st_size > 10 * 2**20
            [jvm] = runtime.jvms
            os.kill(jvm, signal.SIGKILL)
            while jvm in runtime.jvms:
                await a_moment()
            await trial.run(trial.work("count", rows=10))
            [new] = runtime.jvms
            assert new != jvm
            # The JVM has it mapped: it is really in use.
            mapped = await asyncio.to_thread(Path(f"/proc/{new}/maps").read_text)
            assert str(archive) in mapped

    with asyncio.Runner() as runner:
        runner.run(test(Trial(tmp_path, runner, runtime)))
