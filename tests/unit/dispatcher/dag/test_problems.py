"""Every way in which a DAG file can be wrong: the line, the field, and what is said of it.

Each case is a file with a source `s` and, from line 6 on, what is wrong; a case expects all of the
problems of its file and no other.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable

import pytest

from penstock.dispatcher.dag.model import Dag, Job, JobFault
from penstock.dispatcher.dag.parser import parse
from penstock.kernel.errors import InvalidInput
from penstock.protocol.problem import DagDiagnostic, DagError

HEAD = """\
jobs:
  s:
    activation: source
    source: {kind: manual}
    outputs: [raw]
"""
GOOD = """\
  a:
    runtime: process
    operator: f
    inputs: [raw]
    outputs: [a]
"""


class Registry:
    """A process runtime for any code, and a spark runtime with two operators and an opinion."""

    def names(self) -> Collection[str]:
        return ("process", "spark")

    def operators(self, runtime: str) -> Collection[str] | None:
        return ("spark.sql", "spark.python") if runtime == "spark" else None

    def faults(self, job: Job) -> Iterable[JobFault]:
        if job.runtime == "spark" and "sql" not in job.config:
            yield JobFault("config.sql", "It is missing; write a query.")
        if job.resources.get("memory") == "lots":
            yield JobFault("resources.memory", "'lots' is not a size; write it as 2GiB.")

    def queued(self, dag: Dag) -> Dag:
        return dag


def problems_of(text: str) -> tuple[DagDiagnostic, ...]:
    with pytest.raises(DagError) as caught:
        parse(text, "file.yaml", runtimes=Registry())
    return caught.value.problems


def check(text: str, expected: str) -> None:
    """The problems, one a line as `line field: the end or all of the message`."""
    found = [f"{p.line} {p.field}: {p.message}" for p in problems_of(text)]
    wanted = [line.strip() for line in expected.strip().splitlines()]
    assert len(found) == len(wanted), "\n".join(found)
    for said, want in zip(found, wanted, strict=True):
        place, _, words = want.partition(": ")
        assert said.startswith(f"{place}: "), said
        assert words in said, said


def test_what_is_good_is_good() -> None:
    dag = parse(HEAD + GOOD, "file.yaml", runtimes=Registry())
    assert [job.name for job in dag.jobs] == ["a", "s"]
    assert isinstance(dag, Dag)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "1 : It is not valid YAML"),
        ("a: b: c", "1 : mapping values are not allowed here."),
        ("a: 1\n\tb: 2", "2 : It is not valid YAML"),
        ("a:\n  cron: * * * * *", "2 : put a text that begins so in quotes."),
        ("a:\n  cron: @daily", "2 : put a text that begins so in quotes."),
        ("a: *x", "1 : found undefined alias"),
        ("a\n---\nb", "2 : but found another document"),
        ("a: &x [*x]", "1 : It has an alias inside of what it names; write it out."),
        ("a:\n- !!python/object:os.system x", "2 : It has a tag, as in !!str; leave it out"),
        ("a: !x [1]", "1 : It has a tag"),
        ("a: !!map {}", "1 : It has a tag"),
        ('\n\na: "\\UFFFFFFFF"', "3 : a number or an escape that is out of range."),
        ("\na: \x01", "2 : It has the character U+0001, which is not allowed; take it out."),
        ("a: '\ud800'", "1 : It has the character U+D800"),
        ("a:\n " + "[" * 40, "2 : It is nested more than 32 deep; flatten it."),
        ("# " + "x" * 1_000_000, "1 : It is larger than 1,000,000 bytes"),
        ("# " + "é" * 500_000, "1 : It is larger than 1,000,000 bytes"),
        ("[1]", "1 : It is a list; write fields, each as `name: value`."),
        ("text", "1 : It is a text; write fields, each as `name: value`."),
        ("{}", "1 jobs: It is missing; write `jobs:` and a job below it."),
        ("jobs: {}", "1 jobs: There are no jobs; write one."),
        ("jobs: []", "1 jobs: It is a list; write fields"),
        ("jobs:", "1 jobs: It is empty; write fields"),
        ("jbos: {}", "1 jbos: There is no such field. Did you mean jobs?"),
        ("jobs:\n  a:\n  b: 1", "2 jobs.a: It is empty; write\n 3 jobs.b: It is a text; write"),
    ],
)
def test_what_is_no_file_of_jobs(text: str, expected: str) -> None:
    check(text, expected)


def test_aliases_are_counted_as_often_as_they_are_used() -> None:
    tens = ",".join(["x"] * 10)
    levels = [f"a: &a [{tens}]"]
    for one, next_one in zip("abcde", "bcdef", strict=True):
        levels.append(f"{next_one}: &{next_one} [{','.join([f'*{one}'] * 10)}]")
    check("\n".join(levels), "5 : It has more than 50,000 nodes; make several DAGs of it.")
    big = f"a: &a {'x' * 400_000}\nb: [*a,\n*a]\n"
    check(big, "3 : It has more than 1,000,000 characters with its aliases.")
    chain = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 40))]
    check("\n".join(chain), "31 : It is nested more than 32 deep; flatten it.")
    check("[" + "1," * 50_000 + "]", "1 : It has more than 50,000 nodes")


def test_an_alias_may_be_used() -> None:
    text = HEAD + GOOD + "    retry: &r {first: 1s, max: 2s}\n"
    text += GOOD.replace("a:", "b:", 1).replace("[a]", "[b]") + "    retry: *r\n"
    dag = parse(text, "file.yaml")
    assert dag.job("a").retry == dag.job("b").retry
    assert dag.job("b").retry.first_ms == 1000


def test_there_is_a_limit_to_jobs() -> None:
    job = "{activation: source, source: {kind: manual}, outputs: [o%d]}"
    text = "jobs:\n" + "".join(f"  j{n}: {job % n}\n" for n in range(1001))
    check(text, "2 jobs: There are 1001 jobs; at most 1000 are allowed.")


_FIELDS = [
    ("runtme: process", "11 jobs.a.runtme: There is no such field. Did you mean runtime?"),
    ("zzz: 1", "11 jobs.a.zzz: There is no such field. There are activation, source, inputs"),
    ("operator: g", "11 jobs.a.operator: It is given twice, first in line 8; take one out."),
    ("[x]: 1", "11 jobs.a: A name is a list; write a text."),
    ("<<: {timeout: 1s}", "11 jobs.a: Fields cannot be merged with <<; write them out."),
    ("activation: sauce", "11 jobs.a.activation: 'sauce' is not known; write source or reactive."),
    ("activation: [source]", "11 jobs.a.activation: It is a list; write a text."),
    ("execution: per_updat", "11 jobs.a.execution: Did you mean per_update?"),
    (
        "update: upsert",
        "11 jobs.a.update: 'upsert' is not known; write replace or append or merge.",
    ),
    ("priority: high", "11 jobs.a.priority: 'high' is not known; write normal or bulk."),
    ("mode: drop", "11 jobs.a.mode: 'drop' is not known; write pause."),
    (
        "merge_updates: yes",
        "11 jobs.a.merge_updates: 'yes' is neither true nor false; write one of them.",
    ),
    ("merge_updates: 'true'", "11 jobs.a.merge_updates: 'true' is neither true nor false"),
    ("coalesce: many", "11 jobs.a.coalesce: 'many' is not a count; write a whole number"),
    ("coalesce: 0", "11 jobs.a.coalesce: '0' is too small; write at least 1."),
    ("coalesce: 1001", "11 jobs.a.coalesce: '1001' is too large; write at most 1000."),
    ("coalesce: true", "11 jobs.a.coalesce: of it is merge_updates: true now."),
    ("coalesce: false", "11 jobs.a.coalesce: of it is merge_updates: false now."),
    ("coalesce:", "11 jobs.a.coalesce: It is empty; write a text."),
    ("when: both", "11 jobs.a.when: 'both' is not known; write any or all."),
    ("when: all", "11 jobs.a.when: when: all waits for several inputs, and one input alone makes"),
    ("timeout: 30", "11 jobs.a.timeout: '30' is not a duration; write a number with a unit"),
    ("timeout: 5 minutes", "11 jobs.a.timeout: '5 minutes' is not a duration"),
    ("timeout: 30s5m", "11 jobs.a.timeout: has its units in the wrong order"),
    ("timeout: 5m5m", "11 jobs.a.timeout: has its units in the wrong order"),
    ("timeout: 0.5ms", "11 jobs.a.timeout: is finer than a millisecond"),
    ("timeout: 900d", "11 jobs.a.timeout: is longer than a year"),
    ("timeout: 10ms", "11 jobs.a.timeout: is too small; write at least 1s."),
    ("timeout:", "11 jobs.a.timeout: It is empty; write a text."),
    ("heartbeat_timeout: 0s", "11 jobs.a.heartbeat_timeout: is too small; write at least 1s."),
    (
        "heartbeat_timeout: 25h",
        "11 jobs.a.heartbeat_timeout: A worker may be silent for a day at most, not 1d1h; write 1d",
    ),
    ("max_queue_age: soon", "11 jobs.a.max_queue_age: 'soon' is not a duration"),
    ("max_queue_depth: 0", "11 jobs.a.max_queue_depth: '0' is too small; write at least 1."),
    ("max_queue_depth: -5", "11 jobs.a.max_queue_depth: '-5' is not a count; write a whole"),
    ("max_queue_depth: 1.5", "11 jobs.a.max_queue_depth: '1.5' is not a count"),
    ("max_queue_depth: 10m", "11 jobs.a.max_queue_depth: '10m' is not a count"),
    ("max_concurrency: 0", "11 jobs.a.max_concurrency: is too small; write at least 1."),
    ("max_concurrency: 10000000M", "11 jobs.a.max_concurrency: is more than 1,000,000,000,000"),
    ("max_attempts: 101", "11 jobs.a.max_attempts: '101' is too large; write at most 100."),
    ("max_attempts: 0", "11 jobs.a.max_attempts: '0' is too small; write at least 1."),
    ("retry: 3", "11 jobs.a.retry: It is a text; write fields"),
    ("retry: {frist: 1s}", "11 jobs.a.retry.frist: There is no such field. Did you mean first?"),
    ("retry: {backoff: 0.5}", "11 jobs.a.retry.backoff: '0.5' is too small; write at least 1."),
    ("retry: {backoff: .nan}", "11 jobs.a.retry.backoff: '.nan' is not a number; write it as 2"),
    ("retry: {backoff: 101}", "11 jobs.a.retry.backoff: is too large; write at most 100."),
    ("retry: {first: 2m, max: 1m}", "11 jobs.a.retry: The first pause, 2m, is longer than the"),
    ("retry: {first: 1h}", "11 jobs.a.retry: The first pause, 1h, is longer than the longest, 10m"),
    ("config: [1]", "11 jobs.a.config: It is a list; write fields"),
    ("config: {x: no}", "11 jobs.a.config.x: 'no' means different things to different readers"),
    ("config: {x: 1:30}", "11 jobs.a.config.x: '1:30' means different things"),
    ("config: {x: 0x1F}", "11 jobs.a.config.x: '0x1F' means different things"),
    ("config: {x: .inf}", "11 jobs.a.config.x: '.inf' means different things"),
    ("config: {x: 010}", "11 jobs.a.config.x: '010' begins with a zero"),
    ("config: {x: 1e999}", "11 jobs.a.config.x: '1e999' is too large for a number"),
    ("config: {x: [1, 9223372036854775808]}", "11 jobs.a.config.x[1]: of more than 64 bits"),
    ('config: {x: "\\0"}', "11 jobs.a.config.x: It has the character '\\x00', which cannot be"),
    ('config: {x: "\\ud800"}', "11 jobs.a.config.x: It has the character '\\ud800'"),
    ("config: {x: 1, x: 2}", "11 jobs.a.config.x: It is given twice, first in line 11"),
    ('config: {"": 1}', "11 jobs.a.config: '' cannot be a name"),
    ('config: {"a\\nb": 1}', "11 jobs.a.config: 'a\\nb' cannot be a name"),
    ("resources: {memory: lots}", "11 jobs.a.resources.memory: 'lots' is not a size"),
    ("update: merge", "11 jobs.a.update: Merging needs a `unique_key`"),
    ("unique_key: id", "11 jobs.a.unique_key: A `unique_key` is for update: merge only"),
    ("version_by: at", "11 jobs.a.version_by: A `version_by` is for update: merge only"),
    ("delete_when: gone", "11 jobs.a.delete_when: A `delete_when` is for update: merge only"),
    (
        "update: append\n    unique_key: [id]",
        "12 jobs.a.unique_key: Take it out, or write update: merge, which has one row",
    ),
    (
        "update: merge\n    unique_key: [id]\n    version_by: id",
        "13 jobs.a.version_by: The column id is part of the `unique_key`",
    ),
    ("delete_when: ''", "11 jobs.a.delete_when: '' cannot be a predicate"),
    ("unique_key: [id, id]", "11 jobs.a.unique_key[1]: The column id is named twice"),
    ('unique_key: [""]', "11 jobs.a.unique_key[0]: '' cannot be a column"),
    ("resume_queue_depth: 5", "11 jobs.a.resume_queue_depth: It needs a `max_queue_depth`"),
    ("resume_queue_age: 5s", "11 jobs.a.resume_queue_age: It needs a `max_queue_age`"),
    (
        "max_queue_depth: 5\n    resume_queue_depth: 5",
        "12 jobs.a.resume_queue_depth: Pressure begins at 5 and would never end at 5; make it less",
    ),
    (
        "resume_queue_age: 2h\n    max_queue_age: 90m",
        "11 jobs.a.resume_queue_age: Pressure begins at 1h30m and would never end at 2h",
    ),
    ("priority: bulk", "11 jobs.a.priority: A bulk job gives way to the jobs downstream of it"),
    ("source: {kind: manual}", "11 jobs.a.source: A reactive job has no `source`; write activ"),
    (
        "update: merge\n    timeout: x\n    mode: y",
        "11 jobs.a.update: needs\n 12 jobs.a.timeout: not a dur\n 13 jobs.a.mode: not known",
    ),
]


@pytest.mark.parametrize(("field", "expected"), _FIELDS, ids=[field for field, _ in _FIELDS])
def test_a_field_of_a_job(field: str, expected: str) -> None:
    check(f"{HEAD}{GOOD}    {field}\n", expected)


_JOBS = [
    ("A: {runtime: process, operator: f, inputs: raw}", "6 jobs.A: 'A' is not a name; use a-z"),
    ("a: {operator: f, inputs: raw}", "6 jobs.a.runtime: It is missing; write where the job runs"),
    ("a: {runtime: process, inputs: raw}", "6 jobs.a.operator: It is missing; write what the"),
    ("a: {runtme: process, operator: f, inputs: raw}", "6 jobs.a.runtme: Did you mean runtime?"),
    ("a: {runtime: proces, operator: f, inputs: raw}", "6 jobs.a.runtime: Did you mean process?"),
    (
        "a: {runtime: flink, operator: f, inputs: raw}",
        "6 jobs.a.runtime: There is no runtime 'flink'; there are dispatcher, process and spark.",
    ),
    ("a: {runtime: P, operator: f, inputs: raw}", "6 jobs.a.runtime: 'P' is not a name"),
    ("a: {runtime: process, operator: a b, inputs: raw}", "6 jobs.a.operator: 'a b' is not an op"),
    (
        "a: {runtime: spark, operator: spark.sq, inputs: raw}",
        "6 jobs.a.operator: it has spark.python and spark.sql. Did you mean spark.sql?",
    ),
    ("a: {runtime: spark, operator: spark.sql, inputs: raw}", "6 jobs.a.config.sql: It is missing"),
    ("a: {runtime: process, operator: f}", "6 jobs.a.inputs: A reactive job has no inputs"),
    (
        "a: {runtime: process, operator: f, inputs: []}",
        "6 jobs.a.inputs: A reactive job has no inputs",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raaw}",
        "6 jobs.a.inputs: There is no dataset 'raaw'. Did you mean raw?",
    ),
    (
        "a: {runtime: process, operator: f, inputs: [zzzzz]}",
        "6 jobs.a.inputs[0]: There is no dataset 'zzzzz'. There are raw.",
    ),
    (
        "a: {runtime: process, operator: f, inputs: s}",
        "6 jobs.a.inputs: s is a job and not a dataset; write s.raw.",
    ),
    (
        "abc: {runtime: process, operator: f, inputs: [abd.raw]}",
        "6 jobs.abc.inputs[0]: There is no job 'abd'. Did you mean abc?",
    ),
    (
        "a: {runtime: process, operator: f, inputs: [s.rwa]}",
        "6 jobs.a.inputs[0]: The job s has no output 'rwa'; it has raw. Did you mean raw?",
    ),
    (
        "a: {runtime: process, operator: f, inputs: [{form: raw}]}",
        "6 jobs.a.inputs[0].form: There is no such field. Did you mean from?",
    ),
    (
        "a: {runtime: process, operator: f, inputs: [{as: x}]}",
        "6 jobs.a.inputs[0].from: It is missing; write job.output, or the name of a dataset.",
    ),
    (
        "a: {runtime: process, operator: f, inputs: [raw, s.raw]}",
        "6 jobs.a.inputs[1]: The job has two inputs of the name raw; give one of them another by",
    ),
    (
        "a: {runtime: process, operator: f, inputs: {from: raw, as: X}}",
        "6 jobs.a.inputs.as: 'X' is not a name",
    ),
    (
        "a: {runtime: process, operator: f, inputs: {from: nix, where: strat > 1}}",
        "6 jobs.a.inputs.from: no dataset\n 6 jobs.a.inputs.where: ; did you mean start?",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: [raw]}",
        "6 jobs.a.outputs[0]: The dataset raw is already written by the job s, in line 5; give one",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: [x, {name: y, dataset: x}]}",
        "6 jobs.a.outputs[1]: The dataset x is already written by this job, in line 6",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: [x, {name: x, dataset: y}]}",
        "6 jobs.a.outputs[1]: The job has two outputs of the name x; rename one.",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: [{dataset: x}]}",
        "6 jobs.a.outputs[0].name: It is missing; write what the job calls this output.",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: [A B]}",
        "6 jobs.a.outputs[0]: 'A B' is not a name",
    ),
    (
        f"a: {{runtime: process, operator: f, inputs: raw, outputs: [{'x,' * 101}]}}",
        "6 jobs.a.outputs: It has 101 items; at most 100 are allowed.",
    ),
    (
        "a: {runtime: dispatcher, operator: my.code, inputs: raw}",
        "6 jobs.a.operator: The runtime dispatcher runs range_aggregate and range_split and nobody",
    ),
    (
        "a: {runtime: dispatcher, operator: range_split, inputs: raw, outputs: a}",
        "6 jobs.a.config: It is missing; write how long the ranges are",
    ),
    (
        "a: {runtime: dispatcher, operator: range_split, inputs: raw, outputs: a, config: {}}",
        "6 jobs.a.config.size: It is missing; write how long the ranges are, as in size: 10k.",
    ),
    (
        (
            "a: {runtime: dispatcher, operator: range_split, inputs: raw, outputs: a,"
            " config: {size: 1, step: 1}}"
        ),
        "6 jobs.a.config.step: There is no such field.",
    ),
    (
        (
            "a: {runtime: dispatcher, operator: range_aggregate, inputs: raw, outputs: a,"
            " config: {size: 5, step: 10}}"
        ),
        "6 jobs.a.config.step: A step of 10 leaves gaps between ranges of 5",
    ),
    (
        (
            "a: {runtime: dispatcher, operator: range_split, outputs: a, config: {size: 5},"
            " inputs: [raw, {from: raw, as: x}]}"
        ),
        "6 jobs.a.inputs: range_split cuts one input, not 2; make a job for each.",
    ),
    (
        "a: {runtime: dispatcher, operator: range_aggregate, inputs: raw, config: {size: 5}}",
        "6 jobs.a.outputs: range_aggregate has one output, not 0.",
    ),
    (
        (
            "a: {activation: source, source: {kind: always_on}, runtime: dispatcher,"
            " operator: range_split, config: {size: 1}, outputs: a}"
        ),
        "6 jobs.a.operator: range_split reads ranges and cannot be a source; give it inputs.",
    ),
    (
        "a: {activation: source, outputs: a, runtime: process, operator: f}",
        "6 jobs.a.source: needs",
    ),
    ("a: {activation: source, source: {kind: manual}}", "6 jobs.a.outputs: needs an output"),
    (
        "a: {activation: source, source: {kind: manual}, outputs: a, inputs: raw}",
        "6 jobs.a.inputs: A source job has no inputs; take them out, or write activation: reactive",
    ),
    (
        "a: {activation: source, source: {kind: manual}, outputs: a, timeout: 5s, config: {}}",
        (
            "6 jobs.a.timeout: A source of kind manual only emits events and runs nothing; take"
            "\n 6 jobs.a.config: take `config` out"
        ),
    ),
    (
        (
            "a: {activation: source, source: {kind: always_on}, outputs: a, timeout: 5s,"
            " runtime: process, operator: f}"
        ),
        "6 jobs.a.timeout: A source of kind always_on has no queue of tasks; take `timeout` out",
    ),
    (
        "a: {activation: source, source: {kind: always_on}, outputs: a, operator: f}",
        "6 jobs.a.runtime: It is missing",
    ),
    (
        "a: {activation: source, source: {kind: corn}, outputs: a}",
        (
            "6 jobs.a.source.kind: 'corn' is not known; write cron or webhook or manual"
            " or always_on. Did you mean cron?"
        ),
    ),
    ("a: {activation: source, source: {}, outputs: a}", "6 jobs.a.source.kind: It is missing; wri"),
    ("a: {activation: source, source: cron, outputs: a}", "6 jobs.a.source: It is a text; write f"),
    (
        "a: {activation: source, source: {kind: cron}, outputs: a}",
        "6 jobs.a.source.cron: It is missing; write when it fires",
    ),
    (
        "a: {activation: source, source: {kind: cron, cron: 61 * * * *}, outputs: a}",
        "6 jobs.a.source.cron: '61 * * * *' has 61 as its minute; write 0 to 59.",
    ),
    (
        "a: {activation: source, outputs: a, source: {kind: cron, cron: 0 0 1 1 1, time_zone: XX}}",
        "6 jobs.a.source.time_zone: There is no time zone 'XX'; write one as Europe/Zurich.",
    ),
    (
        "a: {activation: source, outputs: a, source: {kind: cron, cron: 0 0 1 1 1, emits: day}}",
        "6 jobs.a.source.emits: 'day' is not known; write cursor or interval.",
    ),
    (
        "a: {activation: source, outputs: a, source: {kind: cron, cron: 0 0 1 1 1, catch_up: 2}}",
        "6 jobs.a.source.catch_up: '2' is neither true nor false",
    ),
    (
        "a: {activation: source, outputs: a, source: {kind: manual, emits: interval}}",
        "6 jobs.a.source.emits: It is for cron sources, and this one is manual; take it out.",
    ),
    (
        "a: {activation: source, outputs: a, source: {kind: webhook, catch_up: true}}",
        "6 jobs.a.source.catch_up: It is for cron sources, and this one is webhook; take it out.",
    ),
    (
        "a: {activation: source, source: {kind: manual, path: /x, cron: 0 0 * * *}, outputs: a}",
        (
            "6 jobs.a.source.path: It is for webhook sources, and this one is manual; take it out."
            "\n 6 jobs.a.source.cron: It is for cron sources"
        ),
    ),
    (
        "a: {activation: source, source: {kind: webhook, path: ../x}, outputs: a}",
        "6 jobs.a.source.path: '../x' is not a path; write it as /orders",
    ),
    *(
        (
            f"a: {{activation: source, source: {{kind: webhook, auth: {auth}}}, outputs: a}}",
            f"6 jobs.a.source.auth{problem}",
        )
        for auth, problem in (
            ("{type: basic, secret: env:A}", ".type: 'basic' is not known; write bearer or hmac"),
            ("{secret: env:A}", ".type: It is missing; write bearer or hmac or github or stripe"),
            ("{type: github}", ".secret: It is missing; write env:VARIABLE, file:NAME, aws:ID"),
            # What stands there may be the secret itself.
            ("{type: slack, secret: sk-live-1}", ".secret: It does not say where the secret is"),
            ("{type: slack, secret: []}", ".secret: It is empty; write env:VARIABLE"),
            ("{type: slack, secret: [env:A, env:A]}", ".secret: It names one place twice"),
            ("{type: slack, secret: [env:A, env:B, env:C]}", ".secret: It has 3 items; at most 2"),
            ("{type: slack, secret: env:PENSTOCK_API_TOKEN}", ".secret: It names a variable that"),
            (
                "{type: github, secret: env:A, tolerance: 1m}",
                ".tolerance: It is for stripe and sla",
            ),
            ("{type: slack, secret: env:A, tolerance: 2h}", ".tolerance: '2h' is not between 1s"),
            ("{type: slack, secret: env:A, header: X-A}", ".header: It is for hmac, and slack has"),
            ("{type: hmac, secret: env:A, header: 'X A'}", ".header: 'X A' cannot be a header"),
            ("secret", ": It is a text; write f"),
        )
    ),
    (
        "a: {activation: source, source: {kind: manual, auth: {}}, outputs: a}",
        "6 jobs.a.source.auth: It is for webhook sources, and this one is manual; take it out.",
    ),
    (
        (
            "a: {activation: source, source: {kind: webhook}, outputs: a}\n"
            "  b: {activation: source, source: {kind: webhook, path: /a}, outputs: b}"
        ),
        "7 jobs.b.source.path: The path /a is already that of a; write another.",
    ),
    (
        (
            "a: {activation: source, source: {kind: always_on, drain_timeout: 5}, outputs: a,"
            " runtime: process, operator: f}"
        ),
        "6 jobs.a.source.drain_timeout: '5' is not a duration",
    ),
    (
        "a: {runtime: process, operator: f, inputs: [{from: raw, trigger: no}]}",
        "6 jobs.a.inputs[0].trigger: 'no' is neither true nor false",
    ),
    (
        "a: {runtime: process, operator: f, inputs: [{from: raw, read: some}]}",
        "6 jobs.a.inputs[0].read: 'some' is not known; write partition or all or changes.",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: [{from: raw, read: changes}], outputs: a}\n"
            "  b: {runtime: process, operator: f, inputs: [{from: a, read: changes}],"
            " max_concurrency: 4, coalesce: 5}\n"
            "  c: {runtime: process, operator: f,"
            " inputs: [{from: a, read: changes, lookback: 1d}], max_concurrency: 1}"
        ),
        (
            "6 jobs.a.inputs: raw only carries events, and has no data that could\n"
            "7 jobs.b.max_concurrency: A job that reads changes (a) runs one task at a time\n"
            "7 jobs.b.coalesce: A job that reads changes (a) runs one task at a time\n"
            "8 jobs.c.inputs: with read: changes it reads something else of a; take one of the two"
        ),
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, outputs: a}\n"
            "  b: {runtime: process, operator: f, inputs: [{from: a, lookback: 1500ms}]}\n"
            "  c: {runtime: process, operator: f, inputs: [{from: a, lookback: 3}]}\n"
            "  d: {runtime: process, operator: f, inputs: [{from: a, lookback: 0s}]}"
        ),
        (
            "7 jobs.b.inputs[0].lookback: '1500ms' is finer than a second; write whole seconds\n"
            "8 jobs.c.inputs[0].lookback: '3' is not a duration\n"
            "9 jobs.d.inputs[0].lookback: '0s' is too small; write at least 1s"
        ),
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: [{from: raw, lookback: 3d}], outputs: a}\n"
            "  b: {runtime: process, operator: f, inputs: [{from: a, lookback: 3d, read: all}]}\n"
            "  c: {runtime: process, operator: f, inputs: [{from: a, lookback: 3d}], outputs: c,"
            " update: append, config: {partition_wise: true}}"
        ),
        (
            "6 jobs.a.inputs: raw only carries events, and has no data to look back\n"
            "7 jobs.b.inputs: with read: all it reads something else of a; take one of the two\n"
            "8 jobs.c.update: update: append would add its rows once more; write update: replace.\n"
            "8 jobs.c.config.partition_wise: with `lookback` it is one of several (a); take one"
        ),
    ),
    (
        "a: {runtime: process, operator: f, inputs: [{from: raw, trigger: false}]}",
        "6 jobs.a.inputs: Nothing makes the job run, for all of its inputs have trigger: false",
    ),
    (
        (
            "a: {runtime: process, operator: f,"
            " inputs: [raw, {from: raw, as: x, trigger: false, where: start > 1}]}"
        ),
        "6 jobs.a.inputs: with trigger: false those of x make none; take one of the two out.",
    ),
    (
        (
            "a: {runtime: process, operator: f, when: all,"
            " inputs: [raw, {from: raw, as: x, trigger: false}]}"
        ),
        "6 jobs.a.when: when: all waits for several inputs, and one input alone makes",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: [{name: a, keep: 5}]}",
        "6 jobs.a.outputs[0].keep: It is a text; write fields",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: [{name: a, keep: {}}]}",
        "6 jobs.a.outputs[0].keep: It bounds nothing; write partitions: 100, age: 90d,",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, outputs: [{name: a,"
            " keep: {partitions: 0, age: 5s, generation: 1}}]}"
        ),
        (
            "6 jobs.a.outputs[0].keep.partitions: '0' is too small; write at least 1.\n"
            "6 jobs.a.outputs[0].keep.age: '5s' is too small; write at least 1m.\n"
            "6 jobs.a.outputs[0].keep.generation: Did you mean generations?"
        ),
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a, keep: {age: 40000d}}}",
        "6 jobs.a.outputs.keep.age: '40000d' is longer than a century; write a shorter one.",
    ),
    (
        "a: {activation: source, source: {kind: manual}, outputs: {name: a, keep: {age: 1d}}}",
        "6 jobs.a.outputs: A source that only emits events has no data to keep",
    ),
    (
        "a: {activation: source, source: {kind: manual}, outputs: {name: a, partition_by: x}}",
        "6 jobs.a.outputs: It makes no rows that `partition_by` could divide; take that out.",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, coalesce: 2,"
            " outputs: {name: a, partition_by: x}}"
        ),
        "6 jobs.a.coalesce: take `coalesce` or `partition_by` out.",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a, partition_by: ' '}}",
        "6 jobs.a.outputs.partition_by: is no SQL expression over the columns of the result",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, outputs: [{name: a,"
            " maintain: {compact: {files: 1, below: 16MB, size: 1}, after: 1}}]}"
        ),
        (
            "6 jobs.a.outputs[0].maintain.compact.files: '1' is too small; write at least 2.\n"
            "6 jobs.a.outputs[0].maintain.compact.below: '16MB' is not a size; write a number\n"
            "6 jobs.a.outputs[0].maintain.compact.size: There is no such field\n"
            "6 jobs.a.outputs[0].maintain.after: '1' is not a duration"
        ),
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a,"
            " maintain: {compact: {below: 1000KiB}, cluster: [x, y, x]}}}"
        ),
        "6 jobs.a.outputs.maintain.cluster: A column is listed twice; remove one.",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a,"
            " maintain: {compact: false}}}"
        ),
        "6 jobs.a.outputs.maintain: It does nothing; write compact: true, or cluster",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a, columns:"
            " {id: bigInt, x: text, n: 'decimal(40,2)', _penstock_task: int, ID: int}}}"
        ),
        (
            "6 jobs.a.outputs.columns.x: 'text' is no type; write boolean, tinyint,\n"
            "6 jobs.a.outputs.columns.n: 'decimal(40,2)' is no type\n"
            "6 jobs.a.outputs.columns._penstock_task: cannot be a column here\n"
            "6 jobs.a.outputs.columns.ID: The column 'ID' is declared twice"
        ),
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a, columns: {}}}",
        "6 jobs.a.outputs.columns: It declares no column; write one, as in id: bigint.",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a, storage: mysql}}",
        "6 jobs.a.outputs.storage: 'mysql' is not known; write files or postgres.",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a, storage: postgres}}",
        "6 jobs.a.outputs: The table of a in Postgres needs `columns`",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw,"
            " outputs: {name: a, storage: postgres, columns: {id: int, xmin: int, ctid: int}}}"
        ),
        "6 jobs.a.outputs: Postgres has columns of its own called xmin and ctid; give those of a",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, update: merge, unique_key: [id, k],"
            " outputs: {name: a, columns: {k: string}}}"
        ),
        "6 jobs.a.outputs: The `columns` of a lack id, which the job merges by",
    ),
    (
        "a: {activation: source, source: {kind: manual}, outputs: {name: a, columns: {a: int}}}",
        "6 jobs.a.outputs: It makes no rows; write `columns` where the data is made.",
    ),
    (
        "a: {runtime: process, operator: f, inputs: raw, outputs: {name: a, maintain: true}}",
        "6 jobs.a.outputs.maintain: It is a text; write fields",
    ),
    (
        (
            "a: {runtime: process, operator: f, inputs: raw, update: append,"
            " outputs: {name: a, maintain: {cluster: [k]}}}"
        ),
        (
            "6 jobs.a.outputs: Of what is appended, files are cut by ranges where they are put"
            " together; write compact: true beside cluster."
        ),
    ),
    (
        (
            "a: {activation: source, source: {kind: manual},"
            " outputs: {name: a, maintain: {compact: true}}}"
        ),
        "6 jobs.a.outputs: It has no files to maintain; write `maintain` where the data is made.",
    ),
    (
        "a: {activation: source, source: {kind: manual}, outputs: a, when: all, coalesce: 2}",
        "6 jobs.a.when: runs nothing; take `when` out\n 6 jobs.a.coalesce: take `coalesce` out",
    ),
    (
        (
            "a: {runtime: dispatcher, operator: range_aggregate, outputs: a, when: all,"
            " config: {size: day}, inputs: [raw, {from: raw, as: x}], coalesce: 3}"
        ),
        (
            "6 jobs.a.when: range_aggregate waits for all of its inputs anyway; take it out.\n"
            "6 jobs.a.coalesce: range_aggregate runs inside the dispatcher"
        ),
    ),
    (
        (
            "a: {runtime: dispatcher, operator: range_aggregate, config: {size: day},"
            " inputs: [raw, {from: raw, as: x, read: all}],"
            " outputs: {name: a, keep: {age: 1d}}}"
        ),
        (
            "6 jobs.a.inputs: range_aggregate goes by the events of its inputs and reads no data\n"
            "6 jobs.a.outputs: A range has no data of its own; write `keep` where the data is made."
        ),
    ),
    (
        (
            "a: {runtime: dispatcher, operator: range_aggregate, inputs: raw, outputs: a,"
            " config: {size: month, step: 5}}"
        ),
        "6 jobs.a.config.step: Parts of the calendar lie end to end; take it out.",
    ),
    (
        (
            "a: {runtime: dispatcher, operator: range_aggregate, inputs: raw, outputs: a,"
            " config: {size: decade}}"
        ),
        "6 jobs.a.config.size: 'decade' is neither a count nor day, week, month or year",
    ),
    (
        (
            "a: {runtime: dispatcher, operator: range_split, inputs: raw, outputs: a,"
            " config: {size: month}}"
        ),
        "6 jobs.a.config.size: 'month' is not a count; write a whole number",
    ),
    (
        "a: {runtime: process, operator: f, inputs: a, outputs: a}",
        "6 jobs.a.inputs: The job a reads its own output; take this input out.",
    ),
    (
        # Who feeds whom is not known of a dataset that two write: that alone is the problem.
        "z: {runtime: process, operator: f, inputs: raw, outputs: {name: o, dataset: raw}}",
        "6 jobs.z.outputs: The dataset raw is already written by the job s, in line 5",
    ),
    (
        (
            "c: {runtime: process, operator: f, inputs: b, outputs: c}\n"
            "  b:\n    runtime: process\n    operator: f\n    inputs: [a, raw]\n    outputs: b\n"
            "  a: {runtime: process, operator: f, inputs: c, outputs: a}\n"
            "  d: {runtime: process, operator: f, inputs: c}"
        ),
        "12 jobs.a.inputs: The DAG has a cycle: a -> b -> c -> a; remove one",
    ),
]


@pytest.mark.parametrize(("job", "expected"), _JOBS, ids=range(len(_JOBS)))
def test_a_job(job: str, expected: str) -> None:
    check(f"{HEAD}  {job}\n", expected)


def test_what_could_not_be_read_is_not_held_against_others() -> None:
    text = """\
jobs:
  s:
    activation: sorce
    source: {kind: manual}
    outputs: [raw, R A W]
  t: nothing
  a:
    priority: bulk
    runtime: process
    operator: f
    inputs: [s.r-a-w, t.out]
    outputs: [a]
  b: {runtime: process, operator: f, inputs: [a, nix]}
  c: {runtime: process, operator: f, inputs: [a], outputs: c, priority: bulk}
"""
    check(
        text,
        """
        3 jobs.s.activation: Did you mean source?
        5 jobs.s.outputs[1]: 'R A W' is not a name
        6 jobs.t: It is a text
        13 jobs.b.inputs[1]: There is no dataset 'nix'.
        """,
    )


def test_without_runtimes_their_names_are_not_judged() -> None:
    text = HEAD + GOOD.replace("process", "elsewhere")
    assert parse(text, "file.yaml").job("a").runtime == "elsewhere"
    check(text, "7 jobs.a.runtime: There is no runtime 'elsewhere'")


def test_the_message_has_the_file_and_every_line() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(HEAD + GOOD + "    timeout: 5\n    mode: x\n", "flights.yaml")
    error = caught.value
    assert error.message.splitlines()[0] == "flights.yaml has 2 problems:"
    assert error.message.splitlines()[1].startswith("  flights.yaml:11: jobs.a.timeout: '5' is not")
    assert error.message.splitlines()[2].startswith("  flights.yaml:12: jobs.a.mode: 'x' is not")
    assert isinstance(error, DagError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.problems, str(again)) == (error.problems, str(error))


def test_what_is_merged_may_be_divided() -> None:
    job = (
        "a: {runtime: process, operator: f, inputs: raw, update: merge, unique_key: [id],"
        " outputs: {name: a, partition_by: x}}"
    )
    assert parse(f"{HEAD}  {job}\n", "file.yaml", runtimes=Registry()).jobs


def test_a_long_list_of_problems_is_cut_in_the_message_alone() -> None:
    text = HEAD + "".join(f"  j{number}: 1\n" for number in range(150))
    with pytest.raises(DagError) as caught:
        parse(text, "file.yaml")
    assert len(caught.value.problems) == 150
    assert len(caught.value.message.splitlines()) == 102
    assert caught.value.message.endswith("and 50 more")


def test_what_is_too_large_in_full_is_refused() -> None:
    # References are texts here, and mappings in the canonical form.
    names = ",".join(f"o{number}" for number in range(100))
    jobs = "".join(
        f"  j{number}: {{activation: source, source: {{kind: manual}},"
        f" outputs: [{names.replace('o', f'o{number}-')}]}}\n"
        for number in range(200)
    )
    check(
        f"jobs:\n{jobs}", "1 : It becomes too large when it is written in full; make several DAGs"
    )
