"""The jar that Spark is given is made of the sources that are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from java.build import build, compiler, sources_digest

from penstock.runtimes.spark.conf import JAR

KILLED = """
package penstock.spark;

import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.concurrent.Executors;
import org.apache.hadoop.fs.Path;

public final class Killed {
    public static void main(String[] words) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
        server.setExecutor(Executors.newCachedThreadPool());
        server.createContext("/", asked -> {
            asked.getRequestBody().readAllBytes();
            String said = asked.getRequestMethod() + " " + asked.getRequestURI().getRawQuery();
            if (said.startsWith("PUT")) {
                sleep(500);
            }
            System.out.println(said);
            byte[] body = "<UploadId>one</UploadId>".getBytes();
            boolean isEmpty = said.startsWith("DELETE");
            asked.sendResponseHeaders(isEmpty ? 204 : 200, isEmpty ? -1 : body.length);
            if (!isEmpty) {
                asked.getResponseBody().write(body);
            }
            asked.close();
        });
        server.start();
        new Plugin().driverPlugin().init(null, null);
        String endpoint = "http://127.0.0.1:" + server.getAddress().getPort();
        Registry.reach("bucket", endpoint, "/bucket", "us-east-1", "", "key", "secret", "");
        Path path = new Path("penstock://bucket/file");
        new PartOutput(path).write(new byte[20 << 20]);
        Thread.currentThread().interrupt();
        PartOutput.drop(path);
        System.out.println(Thread.interrupted());
        System.exit(0);
    }

    private static void sleep(long milliseconds) {
        try {
            Thread.sleep(milliseconds);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }
}
"""
"""A task that is killed while a file of it is on its way: interrupted, and then told to give up."""


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


@pytest.mark.skipif(shutil.which("javac") is None, reason="no compiler of Java is here")
def test_a_killed_task_ends_its_upload_after_the_parts_that_are_on_their_way(
    tmp_path: Path,
) -> None:
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    jars = os.pathsep.join([str(JAR), str(tmp_path), f"{Path(found.origin).parent}/jars/*"])
    (tmp_path / "Killed.java").write_text(KILLED)
    compiled = ["javac", "-nowarn", "-d", str(tmp_path), "-cp", jars, str(tmp_path / "Killed.java")]
    subprocess.run(compiled, check=True, timeout=300, capture_output=True)
    said = subprocess.run(
        ["java", "-Xmx256m", "-cp", jars, "penstock.spark.Killed"],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    part, end = "PUT partNumber=1&uploadId=one", "DELETE uploadId=one"
    assert said.stdout.splitlines() == ["POST uploads=", part, end, "true"]
