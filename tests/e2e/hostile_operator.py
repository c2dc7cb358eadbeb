"""The code of a hostile job: from inside a task it tries all that it should not be able to do.

It is copied into the folder of an installation and run there as the operator of jobs, and as a
program by itself after its attempt is over, with what it has kept. It knows more than an attacker
would: `targets` names the victim's task and lease, its folders, and who runs on the machine. What
became of each try is told by name; who runs it judges. Nothing here is imported by Penstock.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import botocore
import botocore.config
import botocore.exceptions

from tests.e2e.hostile_calls import Api, Said, api_tries, part_of


def run(task: Any) -> Any:
    """The operator of all hostile jobs; the partition says what this one does."""
    claims = part_of(task.token, 1)
    bucket = Bucket(boto3.client("s3", **task.credentials.for_boto3()))
    (out,) = task.outputs.values()
    kept = {"token": task.token, "credentials": task.credentials.for_boto3()}
    (shared,) = task.inputs.values()
    targets = json.loads(bucket.read(f"{shared.location}/targets.json"))
    match task.partition_key.partition("-")[2]:
        case "tries":
            said = {
                "kept": kept,
                "claims": claims,
                "user": os.getuid(),
                "environment": dict(os.environ),
                "s3": bucket_tries(bucket, targets, own=out.location, dataset=out.dataset),
                "session": session_tries(kept["credentials"], targets, shared.location),
                "api": api_tries(targets, task.token),
                "machine": machine_tries(targets) if task.config["machine"] else {},
            }
            bucket.write(f"{out.location}/said.json", json.dumps(said))
        case "thief":
            return {out.name: targets["victim"]["location"]}
        case "ghost" if task.attempt == 1:
            bucket.write(f"{claims['grants']['scratch']}kept.json", json.dumps(kept))
            task.wait(120)
        case _:
            bucket.write(f"{out.location}/data.txt", task.partition_key)
    return None


def main() -> None:
    """What was kept is used by another process, after the attempt, or beside it."""
    asked = json.loads(sys.stdin.read())
    print(json.dumps(later_tries(**asked)))  # noqa: T201 - that is how it tells


class Bucket:
    """A bucket by URLs, with the credentials of the task."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def read(self, url: str) -> str:
        text: str = self.client.get_object(**at(url))["Body"].read().decode()
        return text

    def write(self, url: str, text: str) -> None:
        self.client.put_object(**at(url), Body=text.encode())


def at(url: str) -> dict[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


def tried(work: Callable[[], object]) -> list[Any]:
    """Now: a status and a code of S3, or an error of the machine."""
    try:
        found = work()
    except botocore.exceptions.ClientError as error:
        answer = error.response
        return [answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]]
    except (OSError, ValueError) as error:
        return [type(error).__name__]
    if isinstance(found, dict) and found.get("Errors"):
        # Of several deletes each has an answer of its own.
        return [403, found["Errors"][0]["Code"]]
    return ["done", repr(found)[:200]]


def bucket_tries(bucket: Bucket, targets: Any, *, own: str, dataset: str) -> Said:
    """Every operation on every place that is not the task's."""
    root = targets["root"]
    folder = own.rpartition("/")[0]
    places = {
        "the victim's publication": f"{targets['victim']['location']}/data.txt",
        "the victim's running attempt": f"{targets['victim']['running']}/data.txt",
        "the victim's current.json": f"{root}/datasets/precious/current.json",
        "a neighbour by its beginning": f"{own}x/data.txt",
        "the folder of its partition": f"{folder}/data.txt",
        "another partition of its own": f"{targets['sibling']}/data.txt",
        "current.json of its dataset": f"{root}/datasets/{dataset}/current.json",
        "current.json of its partition": f"{folder}/current.json",
        "the scratch of others": f"{root}/scratch/data.txt",
        "the queue's config": f"{root}/queues/wake-ups/config.json",
        "the queue's control": f"{root}/queues/wake-ups/control.json",
        "what is in the queue": f"{targets['queued']}",
        "the marker of the store": f"{root}/.penstock/marker",
        "the top of the bucket": "s3://penstock/data.txt",
    }
    said: Said = {}
    for name, url in places.items():
        for verb, work in _operations(bucket.client, at(url), mine=at(f"{own}/stolen.txt")):
            said[f"{verb} {name}"] = tried(work)
    own_place = at(f"{own}/data.txt")
    bucket.client.put_object(**own_place, Body=b"x")
    said["delete its own"] = tried(lambda: bucket.client.delete_object(**own_place))
    everything = {"Bucket": own_place["Bucket"]}
    said["list all"] = tried(lambda: bucket.client.list_objects_v2(**everything))
    uploads = {**everything, "Prefix": own_place["Key"]}
    said["list uploads"] = tried(lambda: bucket.client.list_multipart_uploads(**uploads))
    return said


def _operations(
    s3: Any, place: dict[str, str], *, mine: dict[str, str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    bucket = place["Bucket"]
    below = {"Bucket": bucket, "Prefix": f"{place['Key'].rpartition('/')[0]}/".lstrip("/")}
    one = {"Objects": [{"Key": place["Key"]}]}
    yield "get", lambda: s3.get_object(**place)
    yield "head", lambda: s3.head_object(**place)
    yield "list", lambda: s3.list_objects_v2(**below)
    yield "put", lambda: s3.put_object(**place, Body=b"hostile")
    yield "copy from", lambda: s3.copy_object(**mine, CopySource=place)
    yield "copy to", lambda: s3.copy_object(**place, CopySource=mine)
    yield "upload to", lambda: s3.create_multipart_upload(**place)
    yield "delete", lambda: s3.delete_object(**place)
    yield "delete several, with", lambda: s3.delete_objects(Bucket=bucket, Delete=one)


def session_tries(credentials: Mapping[str, str], targets: Any, inside: str) -> Said:
    """What it may read, with a session that is not quite the one it was given."""
    place = at(f"{inside}/targets.json")
    token = credentials["aws_session_token"]
    middle = len(token) // 2
    changed = f"{token[:middle]}{'A' if token[middle] != 'A' else 'B'}{token[middle + 1 :]}"
    bare = {name: said for name, said in credentials.items() if name != "aws_session_token"}
    address = {name: credentials[name] for name in ("region_name", "endpoint_url")}
    unsigned = botocore.config.Config(signature_version=botocore.UNSIGNED)
    nobody = boto3.client("s3", config=unsigned, **address)
    sts = boto3.client("sts", **credentials)
    again = {"RoleArn": targets["role"], "RoleSessionName": "mine"}

    def got(**keys: str) -> Callable[[], object]:
        return lambda: boto3.client("s3", **keys).get_object(**place)

    return {
        "a changed session token": tried(got(**{**credentials, "aws_session_token": changed})),
        "no session token": tried(got(**bare)),
        "another secret": tried(got(**{**credentials, "aws_secret_access_key": "x" * 40})),
        "no signature": tried(lambda: nobody.get_object(**place)),
        "the role again": tried(lambda: sts.assume_role(**again)),
        "a federation token": tried(lambda: sts.get_federation_token(Name="mine")),
    }


def machine_tries(targets: Any) -> Said:
    """What is on the machine: of the worker, of the dispatcher, of others' attempts."""
    process = Path("/proc") / str(targets["worker"])
    said: Said = {}
    for name, path in targets["files"].items():
        file = Path(path)
        said[f"read {name}"] = tried(file.read_bytes)
        said[f"write {name}"] = tried(partial(_open_to_write, file))
    folders = {**targets["folders"], "the worker's files": str(process / "fd")}
    for name, path in folders.items():
        said[f"list {name}"] = tried(partial(_listed, Path(path)))
    for name in ("environ", "mem", "maps"):
        said[f"read the worker's {name}"] = tried((process / name).read_bytes)
    said["end the worker"] = tried(lambda: os.kill(targets["worker"], signal.SIGTERM))
    said["become root"] = tried(lambda: os.setuid(0))
    said["plant code"] = tried(lambda: Path(targets["code"], "planted.py").write_text("x"))
    with socket.socket(socket.AF_UNIX) as database:
        said["connect to Postgres"] = tried(lambda: database.connect(targets["postgres"]))
    return said


def _open_to_write(file: Path) -> None:
    with file.open("r+b"):
        pass


def _listed(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


def later_tries(*, kept: Any, targets: Any, lease_token: str, only: list[str]) -> Said:
    """What an attempt has kept, used by others: its token, its credentials and even its lease."""
    api, token = Api(targets, kept["token"]), kept["token"]
    (grant,) = api.claims["grants"]["write"]
    own = api.output(grant["prefix"].rstrip("/"))
    stolen = api.output(targets["victim"]["location"])
    bucket = Bucket(boto3.client("s3", **kept["credentials"]))
    theirs = f"{targets['victim']['location']}/data.txt"
    tries: dict[str, Callable[[], list[Any]]] = {
        "credentials": lambda: api.credentials(token),
        "query": lambda: api.query(token),
        "query begun": lambda: api.begin(token),
        "publish": lambda: api.publish(token),
        "query, directly": lambda: api.query_directly(token),
        "events": lambda: api.events(token, lease_token),
        "events, renewed": lambda: api.events(api.renewed(token, lease_token), lease_token),
        "heartbeat": lambda: api.heartbeat(token, lease_token),
        "heartbeat, guessed": lambda: api.heartbeat(token),
        "complete": lambda: api.complete(token, lease_token, outputs=own),
        "complete, guessed": lambda: api.complete(token, outputs=own),
        "complete with the victim's": lambda: api.complete(token, lease_token, outputs=stolen),
        "fail": lambda: api.complete(token, lease_token, failure={"reason": "hostile"}),
        "get the victim's": lambda: tried(lambda: bucket.read(theirs)),
        "put the victim's": lambda: tried(lambda: bucket.write(theirs, "hostile")),
    }
    return {name: work() for name, work in tries.items() if not only or name in only}


if __name__ == "__main__":
    main()
