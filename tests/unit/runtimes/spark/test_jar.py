"""The jar that Spark is given is made of the sources that are here."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
from java.build import build, compiler, sources_digest

from penstock.runtimes.spark.conf import JAR


def manifest(jar: Path) -> dict[str, str]:
    with zipfile.ZipFile(jar) as opened:
        lines = opened.read("META-INF/MANIFEST.MF").decode().splitlines()
    return dict(line.split(": ", 1) for line in lines if line)


def test_the_jar_was_made_of_these_sources() -> None:
    assert manifest(JAR)["Sources-Digest"] == sources_digest(), "run make jar, and commit it"


@pytest.mark.skipif(shutil.which("javac") is None, reason="no compiler of Java is here")
def test_the_same_compiler_makes_the_same_jar(tmp_path: Path) -> None:
    if compiler() != manifest(JAR)["Created-By"]:
        pytest.skip(f"the jar was made by {manifest(JAR)['Created-By']}, and here is {compiler()}")
    build(tmp_path / "again.jar")
    assert (tmp_path / "again.jar").read_bytes() == JAR.read_bytes()
