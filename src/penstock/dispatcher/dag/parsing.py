"""The way in: a YAML text becomes a DAG, or one error with everything that is wrong with it.

`parse` never raises anything but `DagError`, whatever the text. It reads in this order: the tree
of nodes within bounds, the outputs of all jobs, each job, then the rules between jobs. A text
that is no YAML at all ends the reading at once; every other problem is noted and the reading goes
on.
"""

from __future__ import annotations

from typing import Final

from penstock.dispatcher.dag.canonical import canonical, plain
from penstock.dispatcher.dag.checks import complaints
from penstock.dispatcher.dag.edges import Catalog, name
from penstock.dispatcher.dag.errors import DagError, Problem
from penstock.dispatcher.dag.files import Files
from penstock.dispatcher.dag.jobs import JOB_FIELDS, note_misplaced, read_job
from penstock.dispatcher.dag.model import Dag, Job
from penstock.dispatcher.dag.nodes import BYTES_MAX, NODES_MAX, UnreadableYaml, compose
from penstock.dispatcher.dag.runtimes import Runtimes
from penstock.dispatcher.dag.sections import Field, Findings, Section
from penstock.kernel.words import shown

JOBS_MAX: Final = 1000


def parse(
    text: str, where: str, *, runtimes: Runtimes | None = None, files: Files | None = None
) -> Dag:
    """The DAG that a text describes; `where` names the file in errors.

    Without `runtimes` it is not judged whether the runtimes exist and what they accept. `files` are
    the texts that `files.references` says it needs.
    """
    return _parse(text, where, runtimes, files, Findings())


def parse_stored(text: str, where: str, *, files: Files | None = None) -> Dag:
    """The DAG of a version that was in force, also if an earlier release has read it.

    What has a new name since then is read by its old one.
    """
    return _parse(text, where, None, files, Findings(is_stored=True))


def _parse(
    text: str, where: str, runtimes: Runtimes | None, files: Files | None, findings: Findings
) -> Dag:
    try:
        tree = compose(text)
    except UnreadableYaml as error:
        problem = Problem(error.line, error.column, "", error.message)
        raise DagError([problem], where=where) from error
    jobs: tuple[Job, ...] = ()
    if tree is None:
        findings.add("", "It is empty; write `jobs:` and a job below it.")
    else:
        jobs = _read_jobs(Field(tree, "", findings), files)
    dag = Dag(jobs)
    _note_complaints(dag, runtimes, findings)
    if not findings.problems:
        _note_size(dag, findings)
    if findings.problems:
        raise DagError(findings.problems, where=where)
    return dag


def _note_size(dag: Dag, findings: Findings) -> None:
    """Note if the canonical form, which says all in full, could not be read back."""
    if len(canonical(dag)) > BYTES_MAX or _nodes(plain(dag)) > NODES_MAX:
        findings.add(
            "", "It becomes too large when it is written in full; make several DAGs of it."
        )


def _nodes(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + _nodes(each) for each in value.values())
    return 1 + sum(map(_nodes, value)) if isinstance(value, list) else 1


def _read_jobs(root: Field, files: Files | None) -> tuple[Job, ...]:
    top = root.section(("jobs",))
    field = top.need("jobs", "write `jobs:` and a job below it")
    if field is None:
        return ()
    entries = list(field.entries())
    if field.is_mapping and not entries:
        field.wrong("There are no jobs; write one.")
    if len(entries) > JOBS_MAX:
        field.wrong(f"There are {len(entries)} jobs; at most {JOBS_MAX} are allowed.")
        return ()
    catalog = Catalog(root.findings)
    sections: dict[str, Section] = {}
    for job, value in entries:
        try:
            name(job)
        except ValueError as error:
            root.findings.add(value.path, f"{shown(job)} {error}.")
        sections[job] = value.section(JOB_FIELDS)
        if not value.is_mapping:
            for each in JOB_FIELDS:
                root.findings.distrust(f"{value.path}.{each}")
    outputs = {job: catalog.add(job, one.get("outputs")) for job, one in sections.items()}
    jobs = []
    for job, section in sorted(sections.items()):
        found = read_job(job, section, outputs=outputs[job], catalog=catalog, files=files)
        note_misplaced(found, section)
        jobs.append(found)
    return tuple(jobs)


def _note_complaints(dag: Dag, runtimes: Runtimes | None, findings: Findings) -> None:
    """Note which rules are broken, but not on the word of a field that could not be read."""
    # Noted at the end, so that one complaint does not hide another.
    broken = {
        field
        for field in ("inputs", "outputs")
        if any(findings.is_broken(f"jobs.{job.name}.{field}") for job in dag.jobs)
    }
    found = [
        each
        for each in complaints(dag, runtimes)
        if not any(findings.is_broken(f"jobs.{each.job}.{read}") for read in each.reads)
        and broken.isdisjoint(each.reads_of_all)
    ]
    for each in found:
        findings.add(f"jobs.{each.job}.{each.field}", each.message)
