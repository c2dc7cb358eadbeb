"""An installation with a victim and hostile jobs in it, and all that happens there, told once.

Real processes on a real S3 with an STS. Partitions say what a hostile task does; see
`tests.e2e.hostile_operator`. In the order in which it is played:

1. The victim publishes the partition `open`, and holds `held`: its attempt runs all the while.
2. The hostile jobs publish something of their own that is harmless.
3. They try everything, the one as a user of its own (`untrusted: true`), the other as the worker's
   user, so without what is on the machine; a third returns the victim's location as its output;
   a fourth keeps its token and hangs.
4. Other processes use what was kept: of the one that hangs, with its lease, and of those that have
   completed. The victim is let go.
5. The worker is killed. The reaper ends the one that hung; its second attempt publishes, and what
   its first has kept is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.dispatcher.client import Client
from penstock.kernel.errors import DispatcherUnavailable
from penstock.kernel.ports import free_port
from penstock.store.s3.local import LocalS3
from tests.architecture.source import ROOT
from tests.e2e.fleet import CLOCK, fleet_of, until
from tests.e2e.hostile_stage import API_TOKEN, SECONDS_MAX, Row, Stage

CODE: Final = ("__init__.py", "e2e/__init__.py", "e2e/hostile_operator.py", "e2e/hostile_calls.py")
VICTIM: Final = """
import json
from pathlib import Path

import boto3


def put(task, name, text):
    (out,) = task.outputs.values()
    bucket, _, key = f"{out.location}/{name}".removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", **task.credentials.for_boto3())
    s3.put_object(Bucket=bucket, Key=key, Body=text.encode())


def run(task):
    print("printed by the victim", flush=True)
    assert task.secrets["VAULT"] == "the victim's secret"
    put(task, "data.txt", f"precious {task.partition_key}")
    for _ in range(1_200):
        if task.partition_key != "held" or Path(task.config["release"]).exists():
            return
        task.wait(0.1)


def share(task):
    put(task, "targets.json", json.dumps(dict(task.payload)))
"""
DAG: Final = """
jobs:
  orders: {activation: source, source: {kind: manual}, outputs: [orders]}
  bait: {activation: source, source: {kind: manual}, outputs: [bait]}
  victim:
    runtime: process
    operator: "victim:run"
    config: {release: "FOLDER/release"}
    inputs: [orders]
    outputs: [precious]
    buffers: [confided]
    secrets: {VAULT: "file:vault"}
  confide:
    runtime: sink
    operator: sink.write
    update: append
    outputs: [{name: confided, buffered: true, columns: {id: string}}, confided_rejected]
  grumble:
    runtime: sink
    operator: sink.write
    update: append
    outputs: [{name: grumbles, buffered: true, columns: {id: string}}, grumbles_rejected]
  share: {runtime: process, operator: "victim:share", inputs: [bait], outputs: [shared]}
  hostile:
    runtime: process
    operator: "tests.e2e.hostile_operator:run"
    config: {machine: UNTRUSTED}
    inputs: [{from: shared, where: 'partition_key glob "h-*"'}]
    outputs: [loot]
    buffers: [grumbles]
    untrusted: UNTRUSTED
    max_attempts: 1
  rogue:
    runtime: process
    operator: "tests.e2e.hostile_operator:run"
    config: {machine: false}
    inputs: [{from: shared, where: 'partition_key glob "r-*"'}]
    outputs: [plunder]
    buffers: [grumbles]
    max_attempts: 1
  ghost:
    runtime: process
    operator: "tests.e2e.hostile_operator:run"
    config: {machine: false}
    inputs: [{from: shared, where: 'partition_key glob "g-*"'}]
    outputs: [remains]
    buffers: [grumbles]
    untrusted: UNTRUSTED
    heartbeat_timeout: 8s
    max_attempts: 2
    retry: {first: 100ms}
"""


@dataclass
class Story:
    """History."""

    told: dict[str, Any] = field(default_factory=dict)
    """What the tries of `hostile` and `rogue` came to, by job: see the operator."""
    later: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """What became of what was kept, by whose it was."""
    tasks: dict[str, Row] = field(default_factory=dict)
    """What tasks are in the end, by job and partition."""
    victim: dict[str, Any] = field(default_factory=dict)
    """What is the victim's, `before` and `after`."""
    published: dict[str, str] = field(default_factory=dict)
    """What the hostile jobs have published of their own, by partition."""
    audit: list[Row] = field(default_factory=list)
    logs: str = ""


async def play(
    folder: Path, server: LocalS3, *, settings: str, told: Mapping[str, object]
) -> Story:
    """The whole story. `settings` are of a worker that can keep untrusted work apart; without
    them none is untrusted. `told` are settings of the fleet besides those that it has here."""
    is_untrusted = bool(settings)
    modules = {"victim.py": VICTIM, "penstock.toml": settings}
    for each in CODE:
        (folder / "tests" / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "tests" / each, folder / "tests" / each)
    vault = folder / "data" / "secrets" / "vault"
    vault.parent.mkdir(mode=0o700, parents=True)
    vault.write_text("the victim's secret\n")
    vault.chmod(0o600)
    every = {
        "store": server.url.replace("s3://penstock", "s3://penstock/lake"),
        "task_role": server.task_role,
        "api_token": API_TOKEN,
        "worker_secret": "",
        "query_port": free_port(),
        "query_memory": "128MiB",
        "query_spill": "1MiB",
        **told,
    }
    own = server.credentials
    keys = {"AWS_ACCESS_KEY_ID": own.access_key, "AWS_SECRET_ACCESS_KEY": own.secret_key}
    dag = DAG.replace("FOLDER", str(folder)).replace("UNTRUSTED", str(is_untrusted).lower())
    async with (
        fleet_of(
            folder, dispatchers=1, workers=1, modules=modules, told=every, variables=keys
        ) as fleet,
        Client(fleet.public_urls()[0], token=API_TOKEN) as client,
    ):
        await fleet.start("query-service")
        stage = Stage(fleet, client, server)
        await _connected(stage)
        await client.apply(dag)
        story = Story()
        try:
            await _tell(stage, story)
        except BaseException as error:
            error.add_note(stage.said())
            raise
        return story


async def _tell(stage: Stage, story: Story) -> None:
    for partition in ("open", "held"):
        await stage.client.trigger("orders", partition_key=partition)
    await stage.until_task("victim", "open", "completed")
    for partition in ("h-calm", "r-calm"):
        await stage.bait(partition)
    await stage.until_task("hostile", "h-calm", "completed")
    await stage.until_task("rogue", "r-calm", "completed")
    targets = await stage.targets()
    story.victim["before"] = await stage.victims()
    siblings = {"h": ("loot", "h-calm"), "r": ("plunder", "r-calm"), "g": ("loot", "h-calm")}
    for partition in ("g-ghost", "h-tries", "r-tries", "h-thief"):
        sibling = await stage.location(*siblings[partition[0]])
        await stage.bait(partition, {**targets, "sibling": sibling})
    for job, partition, dataset in (
        ("hostile", "h-tries", "loot"),
        ("rogue", "r-tries", "plunder"),
    ):
        done = await stage.until_task(job, partition, "completed", "dead")
        assert done["status"] == "completed", f"{done} {stage.said()}"
        said = json.loads(stage.read(f"{await stage.location(dataset, partition)}/said.json"))
        story.told[job] = said
        lease = done["lease_token"]
        story.later[job] = await stage.use(said["kept"], targets, lease_token=lease)
        story.published[partition] = (await stage.published(dataset)).get(partition, "{}")
    await stage.until_task("hostile", "h-thief", "dead", "completed")
    await _end_of_ghost(stage, story, targets)
    story.victim["after"] = await stage.victims()
    for job, partition in (
        *(("victim", "open"), ("victim", "held"), ("hostile", "h-thief"), ("ghost", "g-ghost")),
        *(("hostile", "h-tries"), ("rogue", "r-tries")),
    ):
        story.tasks[f"{job} {partition}"] = await stage.task(job, partition)
    story.audit = await stage.audited()
    story.logs = "\n".join(each.read_text() for each in stage.logs())


async def _end_of_ghost(stage: Stage, story: Story, targets: Any) -> None:
    ghost = await stage.until_task("ghost", "g-ghost", "running")
    place = f"scratch/{ghost['task_id']}-1-"
    await until(lambda: stage.objects(place), seconds=SECONDS_MAX)
    (key,) = stage.objects(place)
    kept = json.loads(stage.read(f"s3://penstock/{key}"))
    lease = ghost["lease_token"]
    only = ("events, renewed", "complete with the victim's", "get the victim's", "put the victim's")
    story.later["running"] = await stage.use(kept, targets, lease_token=lease, only=only)
    (stage.fleet.folder / "release").touch()
    await stage.until_task("victim", "held", "completed")
    await stage.fleet.kill("worker-0")
    # As if its machine had gone with it: nobody else gives the attempt up, but the reaper.
    for each in (stage.fleet.folder / "data" / "workers").glob("*.held"):
        each.unlink()
    await stage.fleet.start("worker-1")
    await stage.until_task("ghost", "g-ghost", "completed", "dead")
    story.later["reaped"] = await stage.use(kept, targets, lease_token=lease)
    story.published["g-ghost"] = (await stage.published("remains")).get("g-ghost", "{}")


async def _connected(stage: Stage) -> None:
    deadline = CLOCK.monotonic() + SECONDS_MAX
    while True:
        try:
            await stage.client.status()
        except DispatcherUnavailable:
            assert CLOCK.monotonic() < deadline, stage.said()
            await CLOCK.sleep(0.1)
        else:
            return
