"""What `penstock demo queue` shows: the pieces below the pipeline, each by itself."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import click

from penstock.cli.demo.pipeline import show_pipeline
from penstock.cli.demo.proof import show_price, show_worlds
from penstock.cli.demo.queue import show_queue
from penstock.cli.demo.store import show_lost_answers, show_trust


def show_pieces() -> None:
    """Show tasks without Spark, the store and the queue, on a store in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name, asyncio.Runner() as runner:
        # Everything that has to be cleaned up is there before the first word.
        runner.get_loop()
        click.secho(
            "What Penstock stands on: a Postgres and a bucket, and the bucket's own queue.",
            bold=True,
        )
        folder = Path(name)
        url = f"file://{folder}/bucket"
        _title(1, "A pipeline, and a worker and a database that die (penstock up)")
        runner.run(show_pipeline(folder))
        _title(2, f"Can this store be trusted? (penstock doctor {url})")
        runner.run(show_trust(url))
        _title(3, "One object, many writers, and a third of the requests go wrong")
        runner.run(show_lost_answers(url))
        _title(4, "A queue in that folder, and a worker that dies")
        runner.run(show_queue(url, folder))
    _title(5, "The same in simulated worlds, where everything goes wrong (penstock sim)")
    show_worlds()
    _title(6, "What it costs on S3, by the real code in virtual time (penstock cost)")
    show_price()
    click.echo(
        "\nGo on with docs/pipeline.md and docs/queue.md: five minutes each, from nothing to\n"
        "something of your own; or with your own bucket: penstock doctor s3://BUCKET/PREFIX"
    )


def _title(number: int, text: str) -> None:
    click.secho(f"\n{number}. {text}", bold=True)
