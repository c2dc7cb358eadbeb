"""The example's functions, as the runtime `process` runs them: five jobs, one partition."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.datasets.layout import path_of
from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.runtime_registry import RegisteredRuntimes
from penstock.runtimes.base import ProducedOutput, WorkInput
from penstock.runtimes.process import ChildSettings, ProcessRuntime
from penstock.runtimes.registry import RuntimeRegistry
from tests.unit.runtimes.benches import place, run, work

EXAMPLES = Path(__file__).parents[3] / "examples"


def _reports(folder: Path) -> list[str]:
    """Run the jobs in their order, the report after each of its inputs."""
    text = (EXAMPLES / "five_jobs.yaml").read_text()
    dag = parse(text, "five_jobs.yaml", runtimes=RegisteredRuntimes(RuntimeRegistry(installed=[])))
    published: dict[str, ProducedOutput] = {}
    reports = []

    async def main() -> None:
        async with ProcessRuntime(ChildSettings(path=(str(EXAMPLES),))) as runtime:
            for name in ("clean", "totals", "report", "outliers", "report"):
                job = dag.job(name)
                inputs = {
                    each.name: WorkInput(
                        dataset=each.dataset,
                        generation="first",
                        location=found.location if (found := published.get(each.dataset)) else None,
                    )
                    for each in job.inputs
                }
                outputs = {each.name: place(each.dataset, folder) for each in job.outputs}
                task = work(
                    job.operator,
                    folder,
                    config=job.config,
                    inputs=inputs,
                    outputs=outputs,
                    payload={"partition_key": "2026-01-31T10"},
                )
                for made in await run(runtime, task):
                    published[outputs[made.output].dataset] = made
                if name == "report":
                    page = path_of(published["report"].location) / "report.md"
                    reports.append(page.read_text())

    asyncio.run(main())
    return reports


def test_the_example_makes_a_report_and_always_the_same(tmp_path: Path) -> None:
    first, last = _reports(tmp_path / "one")
    assert first.startswith("# Sales of 2026-01-31T10\n")
    assert "remarkable" not in first
    assert last.startswith(first)
    assert "remarkable sales: " in last
    assert "EUR" in last
    assert _reports(tmp_path / "two") == [first, last]
