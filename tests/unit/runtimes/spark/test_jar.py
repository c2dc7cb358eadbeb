"""The jar that Spark is given is made of the sources that are here."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import threading
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from java.build import build, compiler, sources_digest

from penstock.runtimes.spark.settings import JAR

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
        // One that is small is on its way although it was closed.
        PartOutput small = new PartOutput(path);
        small.write(new byte[20]);
        small.close();
        PartOutput.drop(path);
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


REACHED = """
package penstock.spark;

import java.nio.file.Files;
import org.apache.hadoop.fs.Path;

public final class Reached {
    public static void main(String[] words) throws Exception {
        new Plugin().driverPlugin().init(null, null);
        String authorities = Files.readString(java.nio.file.Path.of(words[1]));
        Registry.reach("bucket", words[0], "", "us-east-1", authorities, "key", "secret", "");
        Path path = new Path("penstock://bucket/a/file");
        try (PartOutput output = new PartOutput(path)) {
            output.write("rows".getBytes());
        }
        Output.settle(path);
        System.out.println(Output.sizeOf(path) + " " + RangeInput.sizeOf(path));
        Output.drop(path);
        System.exit(0);
    }
}
"""
"""A file that is written, read and removed, of a bucket that is named by its host."""


RENEWED = """
package penstock.spark;

import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.hadoop.fs.Path;

public final class Renewed {
    public static void main(String[] words) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
        String endpoint = "http://127.0.0.1:" + server.getAddress().getPort();
        AtomicInteger refused = new AtomicInteger();
        server.createContext("/", asked -> {
            asked.getRequestBody().readAllBytes();
            String signed = asked.getRequestHeaders().getFirst("authorization");
            boolean isOld = signed.contains("Credential=old/");
            int number = isOld ? refused.incrementAndGet() : 0;
            System.out.println(asked.getRequestMethod() + (isOld ? " old" : " new"));
            if (number == 2) {
                tell(endpoint, "new");
                asked.close(); // As a server that does not read what it refuses.
                return;
            }
            byte[] body = "<Error><Code>ExpiredToken</Code></Error>".getBytes();
            asked.sendResponseHeaders(isOld ? 403 : 200, isOld ? body.length : -1);
            if (isOld) {
                asked.getResponseBody().write(body);
            }
            asked.close();
        });
        server.start();
        new Plugin().driverPlugin().init(null, null);
        tell(endpoint, "old");
        Path path = new Path("penstock://bucket/file");
        try (PartOutput output = new PartOutput(path)) {
            output.write(new byte[20]);
        }
        try {
            Output.settle(path);
        } finally {
            System.exit(0);
        }
    }

    private static void tell(String endpoint, String key) {
        Registry.reach("bucket", endpoint, "/bucket", "us-east-1", "", key, "secret", "token");
    }
}
"""
"""A file that is sent with keys that have expired, of which the driver learns a moment later."""


class Server(BaseHTTPRequestHandler):
    """A bucket whose clock is twenty minutes ahead of everybody's."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    hosts: ClassVar[set[str]] = set()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(self._now(), usegmt=True)

    def _now(self) -> datetime:
        return datetime.now(UTC) + timedelta(minutes=20)  # noqa: TID251 - a clock of its own

    def _answer(self) -> None:
        self.hosts.add(self.headers["host"].partition(":")[0])
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        said = datetime.strptime(self.headers["x-amz-date"] + "+0000", "%Y%m%dT%H%M%SZ%z")
        if abs(self._now() - said) > timedelta(minutes=15):
            return self._send(403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>")
        if self.command == "PUT":
            self.objects[self.path] = body
            return self._send(200, b"")
        if self.command == "DELETE":
            del self.objects[self.path]
            return self._send(204, b"")
        found = self.objects.get(self.path)
        if found is None:
            return self._send(404, b"")
        return self._send(206, found, range_=f"bytes 0-{len(found) - 1}/{len(found)}")

    do_GET = do_PUT = do_DELETE = _answer  # noqa: N815 - as it has to be called

    def _send(self, status: int, body: bytes, *, range_: str = "") -> None:
        self.send_response(status)
        if range_:
            self.send_header("content-range", range_)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def certified(folder: Path, host: str) -> tuple[ssl.SSLContext, Path]:
    """What a server of this name needs for TLS, and the certificate that vouches for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)  # noqa: TID251 - certificates are of this machine's time
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, both = folder / "public.pem", folder / "both.pem"
    public.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    both.write_bytes(private + public.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return context, public


def run_java(folder: Path, name: str, text: str, *words: str, options: Sequence[str] = ()) -> str:
    """What a program that stands beside the jar has printed."""
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    jars = os.pathsep.join([str(JAR), str(folder), f"{Path(found.origin).parent}/jars/*"])
    (folder / f"{name}.java").write_text(text)
    compiled = ["javac", "-nowarn", "-d", str(folder), "-cp", jars, str(folder / f"{name}.java")]
    subprocess.run(compiled, check=True, timeout=300, capture_output=True)
    command = ["java", "-Xmx256m", *options, "-cp", jars, f"penstock.spark.{name}", *words]
    said = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    return said.stdout


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
    said = run_java(tmp_path, "Killed", KILLED)
    part, end = "PUT partNumber=1&uploadId=one", "DELETE uploadId=one"
    large, small = ["POST uploads=", part, end, "true"], ["PUT null", "DELETE null"]
    assert said.splitlines() == [*large, *small]


@pytest.mark.skipif(shutil.which("javac") is None, reason="no compiler of Java is here")
def test_keys_that_the_driver_learns_of_after_they_were_refused_are_used(tmp_path: Path) -> None:
    said = run_java(tmp_path, "Renewed", RENEWED)
    assert said.splitlines() == ["PUT old", "PUT old", "PUT new"]


@pytest.mark.skipif(shutil.which("javac") is None, reason="no compiler of Java is here")
def test_a_bucket_with_an_authority_a_host_and_a_clock_of_its_own(tmp_path: Path) -> None:
    host = "bucket.s3.test"
    context, public = certified(tmp_path, host)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 {host}\n")
    try:
        endpoint = f"https://{host}:{server.server_port}"
        options = [f"-Djdk.net.hosts.file={hosts}"]
        said = run_java(tmp_path, "Reached", REACHED, endpoint, str(public), options=options)
    finally:
        server.shutdown()
        server.server_close()
    assert said.splitlines() == ["4 4"]
    assert Server.hosts == {host}
    assert Server.objects == {}
