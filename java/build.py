"""Makes the jar that Spark reads and writes buckets with, from the sources beside this file.

    python java/build.py [TO]

It is part of the repository and of the wheel, so that nobody needs a compiler to install Penstock;
run `make jar` after an edit and commit what it makes. Equal sources and an equal compiler give
equal bytes: entries are sorted and have no time. The manifest has a digest of the sources, by
which a test sees that the jar is theirs, and the compiler's version.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
JAR: Final = HERE.parent / "src/penstock/runtimes/spark/access/penstock-spark.jar"
RELEASE: Final = "17"
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_COMPILE_SECONDS_MAX: Final = 300


def sources() -> list[Path]:
    """What the jar is made of, in order."""
    return sorted(HERE.rglob("*.java"))


def sources_digest() -> str:
    """Half a SHA-256 over all sources and their names: a line of a manifest is short."""
    digest = hashlib.sha256()
    for path in sources():
        body = path.read_bytes()
        digest.update(f"{path.relative_to(HERE).as_posix()} {len(body)}\n".encode())
        digest.update(body)
    return digest.hexdigest()[:32]


def compiler() -> str:
    """What `javac` says of itself. Raises `OSError` if there is none."""
    said = subprocess.run(
        ["javac", "-version"],  # noqa: S607 - whichever is on the path
        check=True,
        capture_output=True,
        text=True,
        timeout=_COMPILE_SECONDS_MAX,
    )
    return (said.stdout or said.stderr).strip()


def build(to: Path) -> None:
    """Compile, and make the jar."""
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    jars = Path(found.origin).parent / "jars"
    with tempfile.TemporaryDirectory() as folder:
        words = ["--release", RELEASE, "-Xlint:all,-path,-deprecation,-serial,-classfile"]
        subprocess.run(  # noqa: S603 - our own sources
            ["javac", *words, "-d", folder, "-cp", f"{jars}/*", *map(str, sources())],  # noqa: S607
            check=True,
            timeout=_COMPILE_SECONDS_MAX,
        )
        classes = sorted(Path(folder).rglob("*.class"))
        entries = [(each.relative_to(folder).as_posix(), each.read_bytes()) for each in classes]
    manifest = (
        "Manifest-Version: 1.0\r\n"
        f"Created-By: {compiler()}\r\n"
        f"Sources-Digest: {sources_digest()}\r\n"
        "\r\n"
    )
    # Beside it, and then in its place: a JVM that has the old one open must not see it change.
    made = to.with_suffix(".new")
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as jar:
        for name, body in [("META-INF/MANIFEST.MF", manifest.encode()), *entries]:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            jar.writestr(entry, body)
    made.replace(to)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else JAR)
