"""Secrets through a real dispatcher, a real worker and a real child process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.aws import aws_client
from penstock.runtimes.process import process
from penstock.worker.secrets import AwsSecretStore, SecretResolver
from tests.integration.aws_server import AwsServer
from tests.integration.worker.site import Site, play

VALUES = {"env": "environment-7f3a", "file": "from-a-file-91c2", "aws": "from-aws-0b4d"}
CODE = """
from pathlib import Path

def fetch(task):
    print(task.secrets)
    if task.partition_key == "broken":
        raise ValueError(f"401 Unauthorized: {task.secrets['KEY']}, {task.secrets['PASSWORD']}")
    told = " ".join(task.secrets[name][::-1] for name in ("KEY", "CERT", "PASSWORD"))
    Path(task.outputs["tidy"].path, "part.txt").write_text(told)
"""
DAG = """
jobs:
  feed:
    activation: source
    source: {kind: manual}
    outputs: [raw]
  fetch:
    runtime: process
    operator: CODE:fetch
    inputs: [raw]
    outputs: [tidy]
    max_attempts: 1
    secrets:
      KEY: env:SHOP_KEY
      CERT: file:cert.pem
      PASSWORD: aws:penstock/end-to-end#password
  lacking:
    runtime: process
    operator: CODE:fetch
    inputs: [raw]
    outputs: [never]
    max_attempts: 1
    secrets: {KEY: env:NOBODY_HAS_THIS}
"""


def test_a_function_has_its_secrets_and_nobody_else_does(
    dsn: str, tmp_path: Path, aws_server: AwsServer, caplog: pytest.LogCaptureFixture
) -> None:
    module = f"code_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(CODE)
    (tmp_path / "secrets").mkdir(mode=0o700)
    (tmp_path / "secrets" / "cert.pem").write_text(VALUES["file"] + "\n")
    client = aws_client("secretsmanager", aws=aws_server.aws)
    client.create_secret(
        Name="penstock/end-to-end", SecretString=f'{{"password": "{VALUES["aws"]}"}}'
    )
    resolver = SecretResolver(
        environment={"SHOP_KEY": VALUES["env"]},
        folder=tmp_path / "secrets",
        prefix="penstock/",
        vault=AwsSecretStore(aws_server.aws),
    )

    async def story(site: Site) -> None:
        runtime = process({"path": [str(tmp_path)]})
        async with site.working(runtime, concurrency=2, secrets=resolver):
            await site.pipeline.send("good", "broken")
            await site.until_all(completed=1, dead=3)
        reasons = {
            (row["name"], row["partition_key"]): row["reason"]
            for row in await site.world.rows(
                "SELECT job.name, payload ->> 'partition_key' AS partition_key, reason"
                " FROM task JOIN job ON job.id = job_id WHERE status = 'dead'"
            )
        }
        assert "ValueError: 401 Unauthorized: ***, ***" in reasons["fetch", "broken"]
        assert reasons["lacking", "good"] == reasons["lacking", "broken"]
        assert reasons["lacking", "good"] == (
            "The secret KEY of job lacking (env:NOBODY_HAS_THIS) is not there: this worker has no"
            " variable NOBODY_HAS_THIS in its environment; set it where the worker is started."
        )
        for value in VALUES.values():
            assert not await _mentions(site, value)

    play(dsn, tmp_path, DAG.replace("CODE", module), story)
    (made,) = (tmp_path / "store").rglob("part.txt")
    assert made.read_text() == " ".join(value[::-1] for value in VALUES.values())
    logs = "".join(each.read_text() for each in (tmp_path / "logs").iterdir())
    assert "Secrets(CERT, KEY, PASSWORD)" in logs
    assert "401 Unauthorized: ***" in logs
    kept = [
        each for each in tmp_path.rglob("*") if each.is_file() and each.parent.name != "secrets"
    ]
    assert len(kept) >= 4
    for value in VALUES.values():
        assert value not in caplog.text
        assert [each for each in kept if value.encode() in each.read_bytes()] == []


async def _mentions(site: Site, value: str) -> list[Any]:
    """The tables of the database in which a value stands."""
    tables = await site.world.rows(
        "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p')"
        " AND relnamespace = 'public'::regnamespace"
    )
    assert len(tables) > 10
    found = []
    for row in tables:
        rows = await site.world.rows(f'SELECT said::text FROM "{row["relname"]}" AS said')
        if any(value in each["said"] for each in rows):
            found.append(row["relname"])
    return found
