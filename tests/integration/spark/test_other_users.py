"""What another user of this machine can do to the JVM of a worker: see that it is there.

A process of untrusted work runs as a user of its own, beside the worker, and may connect to every
port of this machine. It speaks Spark's protocol here, byte by byte, without the secret of the JVM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.spark.conftest import ODD, ODD_NAME, PASSWORD, PASSWORD_NAME

STRANGER = 60_190
ENDPOINT = "LocalSchedulerBackendEndpoint"
RPC, RPC_FAILED, STREAM, STREAM_FAILED, ONE_WAY = 3, 5, 6, 8, 9
"""Types of Spark's messages."""

ATTACK = """
import encodings.idna, json, os, socket, sys
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
answers = []
for port, frame in json.load(sys.stdin):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as to:
        to.sendall(bytes.fromhex(frame))
        to.settimeout(3)
        try:
            answers.append(to.recv(65536).hex())
        except TimeoutError:
            answers.append("")
json.dump(answers, sys.stdout)
"""


def answers(*frames: tuple[int, bytes]) -> list[bytes]:
    """What another user hears who sends these frames to ports, one connection each."""
    program = ATTACK.format(uid=STRANGER)
    sent = json.dumps([(port, frame.hex()) for port, frame in frames])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        input=sent.encode(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [bytes.fromhex(each) for each in json.loads(done.stdout)]


def framed(kind: int, body: bytes, *, number: int | None = None) -> bytes:
    """A message of Spark's transport layer."""
    sent = bytes([kind])
    if number is not None:
        sent += number.to_bytes(8, "big")
    sent += len(body).to_bytes(4, "big") + body
    return (8 + len(sent)).to_bytes(8, "big") + sent


def to_endpoint(java: Any, port: int, endpoint: str, message: Any) -> bytes:
    """The body of a message to an endpoint, as Spark's own driver would send it."""
    out = java.java.io.ByteArrayOutputStream()
    data = java.java.io.DataOutputStream(out)
    data.writeBoolean(False)
    data.writeBoolean(True)
    data.writeUTF("127.0.0.1")
    data.writeInt(port)
    data.writeUTF(endpoint)
    objects = java.java.io.ObjectOutputStream(out)
    objects.writeObject(message)
    objects.flush()
    return bytes(out.toByteArray())


def ports(jvm: Any) -> Mapping[str, int]:
    managers = jvm._spark_context.getExecutorMemoryStatus().keys().mkString(",")
    return {
        "rpc": int(jvm._context.getConf().get("spark.driver.port")),
        "blocks": int(managers.rpartition(":")[2]),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_command_the_jvm(jvm: Any) -> None:
    java, at = jvm._context._jvm, ports(jvm)
    stop = getattr(getattr(java.org.apache.spark.scheduler.local, "StopExecutor$"), "MODULE$")
    verifier = getattr(java.org.apache.spark.rpc.netty, "RpcEndpointVerifier$CheckExistence")
    is_there = to_endpoint(java, at["rpc"], "endpoint-verifier", verifier(ENDPOINT))
    stop_it = to_endpoint(java, at["rpc"], ENDPOINT, stop)
    heard = answers(
        (at["rpc"], framed(RPC, is_there, number=1)),
        (at["blocks"], framed(RPC, is_there, number=1)),
        (at["rpc"], framed(STREAM, b"/files/notes.txt")),
    )
    assert [body[8] for body in heard] == [RPC_FAILED, RPC_FAILED, STREAM_FAILED], heard
    answers((at["rpc"], framed(RPC, stop_it, number=1)), (at["rpc"], framed(ONE_WAY, stop_it)))
    assert jvm.fresh().range(100).selectExpr("sum(id)").first()[0] == 4950


def test_settings_reach_the_jvm_by_no_argument(jvm: Any) -> None:
    said = dict(jvm._context.getConf().getAll())
    assert said[PASSWORD_NAME] == PASSWORD
    assert jvm._context._jvm.java.lang.System.getProperty(ODD_NAME) == ODD
    assert "spark.authenticate.secret" not in said
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            assert PASSWORD.encode() not in each.read_bytes()
