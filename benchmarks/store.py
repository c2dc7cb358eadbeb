"""Operations a second and client CPU per 1,000 requests: our S3 backend and boto3, side by side.

Both talk to one SeaweedFS that this starts, in the same run, with the same bodies and the same
number of requests in flight. CPU is that of this process, all threads; the server is another.
On a small machine client and server share the cores, so the rates are rates of the pair, and the
CPU is what tells the clients apart. Run `make bench`, or `python -m benchmarks.store --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.config

from penstock.kernel.clock import SystemClock
from penstock.store.base import CREATE
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.local import LocalS3

KINDS = ("conditional put", "get", "delete")


@dataclass(frozen=True)
class Measured:
    """One client, one kind of request."""

    client: str
    kind: str
    per_second: float
    cpu_seconds_per_1000: float


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _measured(client: str, kind: str, count: int, began: float, cpu: float) -> Measured:
    took = time.monotonic() - began
    return Measured(client, kind, count / took, 1000 * (_cpu() - cpu) / count)


async def measure_penstock(server: LocalS3, *, count: int, in_flight: int) -> list[Measured]:
    """The S3 backend of Penstock, bare."""
    config = s3_config(server.url, environment={}, credentials=server.credentials)
    store = S3Store(config, clock=SystemClock())
    body = b"x" * 1024

    async def put(key: str) -> None:
        await store.put(key, body, CREATE)

    async def get(key: str) -> None:
        await store.get(key)

    async def delete(key: str) -> None:
        await store.delete(key)

    async def drive(request: Callable[[str], Awaitable[None]], keys: Iterator[str]) -> None:
        async def one() -> None:
            for key in keys:
                await request(key)

        await asyncio.gather(*(one() for _ in range(in_flight)))

    results = []
    for kind, request in zip(KINDS, (put, get, delete), strict=True):
        began, cpu = time.monotonic(), _cpu()
        await drive(request, (f"penstock/{number}" for number in range(count)))
        results.append(_measured("penstock", kind, count, began, cpu))
    await store.close()
    return results


def measure_boto3(server: LocalS3, *, count: int, in_flight: int) -> list[Measured]:
    """The client that most people use, from a pool of threads."""
    client: Any = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.credentials.access_key,
        aws_secret_access_key=server.credentials.secret_key,
        region_name="us-east-1",
        config=botocore.config.Config(max_pool_connections=in_flight, retries={"max_attempts": 1}),
    )
    body = b"x" * 1024
    where = {"Bucket": "penstock"}
    requests: tuple[Callable[[str], Any], ...] = (
        lambda key: client.put_object(**where, Key=key, Body=body, IfNoneMatch="*"),
        lambda key: client.get_object(**where, Key=key)["Body"].read(),
        lambda key: client.delete_object(**where, Key=key),
    )
    results = []
    with ThreadPoolExecutor(in_flight) as pool:
        for kind, request in zip(KINDS, requests, strict=True):
            began, cpu = time.monotonic(), _cpu()
            list(pool.map(request, (f"boto3/{number}" for number in range(count))))
            results.append(_measured("boto3", kind, count, began, cpu))
    return results


async def measure(*, count: int, in_flight: int) -> list[Measured]:
    """Both clients, in turn, on one server."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with LocalS3(Path(folder), grace_seconds=2) as server:
            # A first round of each warms connections, caches and the server's volumes.
            results: list[Measured] = []
            for size in (200, count):
                ours = await measure_penstock(server, count=size, in_flight=in_flight)
                theirs = await asyncio.to_thread(
                    measure_boto3, server, count=size, in_flight=in_flight
                )
                results = ours + theirs
            return results


def _show(results: list[Measured]) -> None:
    by = {(each.client, each.kind): each for each in results}
    print(f"{'':18}{'penstock':>24}{'boto3':>24}{'CPU ratio':>12}")
    print(f"{'':18}{'op/s   CPU s/1,000':>24}{'op/s   CPU s/1,000':>24}")
    for kind in KINDS:
        ours, theirs = by["penstock", kind], by["boto3", kind]
        ratio = ours.cpu_seconds_per_1000 / theirs.cpu_seconds_per_1000
        print(
            f"{kind:18}"
            f"{ours.per_second:>12,.0f}{ours.cpu_seconds_per_1000:>12.3f}"
            f"{theirs.per_second:>12,.0f}{theirs.cpu_seconds_per_1000:>12.3f}"
            f"{ratio:>12.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000, help="requests of each kind")
    parser.add_argument("--in-flight", type=int, default=32, help="requests at once")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    words = parser.parse_args()
    results = asyncio.run(measure(count=words.count, in_flight=words.in_flight))
    if words.json:
        print(json.dumps([asdict(each) for each in results], indent=2))
    else:
        _show(results)


if __name__ == "__main__":
    main()
