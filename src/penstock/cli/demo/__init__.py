"""`penstock demo`: what there is to see, on a store in a temporary folder."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import click

from penstock.cli.demo.proof import show_price, show_worlds
from penstock.cli.demo.queue import show_queue
from penstock.cli.demo.store import show_lost_answers, show_trust


@click.command(epilog="Example: penstock demo")
def demo() -> None:
    """Show what Penstock can do, on embedded defaults. Takes half a minute."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name, asyncio.Runner() as runner:
        # Everything that has to be cleaned up is there before the first word.
        runner.get_loop()
        click.secho("Penstock, so far: a task queue that lives in a bucket alone.", bold=True)
        folder = Path(name)
        url = f"file://{folder}/bucket"
        _title(1, f"Can this store be trusted? (penstock doctor {url})")
        runner.run(show_trust(url))
        _title(2, "One object, many writers, and a third of the requests go wrong")
        runner.run(show_lost_answers(url))
        _title(3, "A queue in that folder, and a worker that dies")
        runner.run(show_queue(url, folder))
    _title(4, "The same in simulated worlds, where everything goes wrong (penstock sim)")
    show_worlds()
    _title(5, "What it costs on S3, by the real code in virtual time (penstock cost)")
    show_price()
    click.echo(
        "\nGo on with docs/queue.md: five minutes from nothing to a worker of your own,\n"
        "or with your own bucket: .venv/bin/penstock doctor s3://BUCKET/PREFIX"
    )


def _title(number: int, text: str) -> None:
    click.secho(f"\n{number}. {text}", bold=True)
