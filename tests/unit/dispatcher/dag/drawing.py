"""DAGs that hypothesis draws: any that keep the rules, with whatever texts and numbers fit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from penstock.datasets.schema import Column, is_hidden
from penstock.dispatcher.dag.checks import HEARTBEAT_MS_MAX
from penstock.dispatcher.dag.filters import And, Comparison, FilterOperator, Or, Where
from penstock.dispatcher.dag.model import (
    DISPATCHER_RUNTIME,
    Activation,
    AlwaysOnSource,
    AuthType,
    CompactSpec,
    CronSource,
    Dag,
    Emits,
    Execution,
    Graph,
    InputCondition,
    InputSpec,
    Job,
    KeepSpec,
    MaintainSpec,
    ManualSource,
    OutputSpec,
    OutputStorage,
    Priority,
    ReadMode,
    RetryPolicy,
    Source,
    UpdateMode,
    WebhookAuth,
    WebhookSource,
)
from penstock.kernel.cron import parse_cron

INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
KEYS = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Cf", "Co", "Cn", "Zl", "Zp"]), min_size=1
).filter(lambda text: text.isprintable() and len(text) <= 128)
NAMES = st.text("abcz09_-", min_size=1, max_size=6)
SCALARS = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
    | st.sampled_from(["yes", "1e5", "010", "1:30", "~", "null", "2024-01-01", "0x1F", "<<", "="])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
CONFIGS = st.dictionaries(KEYS, JSON, max_size=3)
MILLISECONDS = st.integers(1000, 10**9)
OPERATORS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,8}", fullmatch=True)

COMPARISONS = st.builds(
    Comparison,
    st.sampled_from(["start", "end", "cursor"]),
    st.sampled_from(list(FilterOperator)[:6]),
    INTEGERS,
) | st.builds(
    Comparison,
    st.just("partition_key"),
    st.sampled_from(
        [FilterOperator.EQUAL, FilterOperator.UNEQUAL, FilterOperator.GLOB, FilterOperator.NOT_GLOB]
    ),
    TEXTS,
)


def _groups(depth: int) -> st.SearchStrategy[Where]:
    """Filters whose groups alternate, as the parser makes them."""
    if depth == 0:
        return COMPARISONS
    inner = _groups(depth - 1)
    every = st.lists(
        inner.filter(lambda term: not isinstance(term, And)), min_size=2, max_size=3
    ).map(lambda terms: And(tuple(terms)))
    either = st.lists(
        inner.filter(lambda term: not isinstance(term, Or)), min_size=2, max_size=3
    ).map(lambda terms: Or(tuple(terms)))
    return COMPARISONS | every | either


WHERES = _groups(2)

CRONS = st.sampled_from(
    ["0 * * * *", "*/5 0-6,12 1-31/2 jan-mar sat-sun", "@daily", "0 0 29 2 *", "* * * * *"]
).map(parse_cron)


KEEPS = st.none() | st.builds(
    KeepSpec,
    partitions=st.none() | st.integers(1, 10**6),
    age_ms=st.none() | st.integers(60_000, 10**12),
    generations=st.integers(1, 100),
)

MAINTAINED = st.none() | st.builds(
    MaintainSpec,
    compact=st.builds(
        CompactSpec,
        files=st.integers(2, 10**6),
        below_bytes=st.integers(1, 2**24).map(lambda each: 1024 * each),
    ),
    cluster=st.lists(KEYS, max_size=3, unique=True).map(tuple),
    after_ms=MILLISECONDS,
)
DECLARED = st.just(()) | st.tuples(
    st.lists(
        st.builds(
            Column,
            KEYS.filter(lambda each: len(each.encode()) <= 63 and not is_hidden(each)),
            st.sampled_from(["int", "decimal(12,2)", "timestamp_ntz", "map<string,array<date>>"]),
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda each: each.name.casefold(),
    ).map(tuple),
    st.sampled_from(OutputStorage),
)

SECRETS = st.dictionaries(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
    st.sampled_from(["env:KEY", "file:a.key", "aws:penstock/db", "aws:penstock/db#pass word"]),
    max_size=2,
)

PLACES = st.sampled_from(["env:KEY", "file:a.key", "aws:penstock/db#pass word"])


@st.composite
def _auths(draw: st.DrawFn) -> WebhookAuth:
    kind = draw(st.sampled_from(AuthType))
    secrets = draw(st.lists(PLACES, min_size=1, max_size=2, unique=True))
    auth = WebhookAuth(type=kind, secrets=tuple(secrets))
    if kind.is_dated:
        return replace(auth, tolerance_ms=1000 * draw(st.integers(1, 3600)))
    if kind is AuthType.HMAC:
        return replace(auth, header=draw(st.sampled_from([auth.header, "X-Shop-Sum"])))
    return auth


AUTHS = st.none() | _auths()


@st.composite
def _sources(draw: st.DrawFn, name: str) -> Job:
    source: Source = draw(
        st.one_of(
            st.builds(
                CronSource,
                CRONS,
                st.sampled_from(["UTC", "Europe/Zurich"]),
                st.sampled_from(Emits),
                st.booleans(),
            ),
            st.builds(WebhookSource, st.sampled_from([f"/{name}", f"/x/{name}"]), AUTHS),
            st.just(ManualSource()),
            st.builds(AlwaysOnSource, st.integers(0, 10**7)),
        )
    )
    job = Job(name=name, activation=Activation.SOURCE, source=source)
    if not isinstance(source, AlwaysOnSource):
        return job
    return replace(job, runtime=draw(NAMES), operator=draw(OPERATORS), config=draw(CONFIGS))


# Who reads changes runs one task at a time, and of a source there are none to read.
READS = st.sampled_from([ReadMode.PARTITION, ReadMode.ALL])


@st.composite
def _reactive(draw: st.DrawFn, name: str, datasets: list[str]) -> Job:
    edges = draw(st.dictionaries(NAMES, st.sampled_from(datasets), min_size=1, max_size=3))
    inputs = [
        InputSpec(each, edges[each], draw(st.none() | WHERES), reads=draw(READS))
        for each in sorted(edges)
    ]
    if draw(st.booleans()):
        inputs.append(InputSpec("zz-read", edges[min(edges)], is_trigger=False))
    triggers = sum(each.is_trigger for each in inputs)
    depth, age = draw(st.none() | st.integers(1, 10**6)), draw(st.none() | MILLISECONDS)
    first = draw(st.integers(0, 10**6))
    update = draw(st.sampled_from(UpdateMode))
    is_untrusted = draw(st.booleans())
    is_merging = update is UpdateMode.MERGE
    columns = draw(st.lists(KEYS, min_size=2, max_size=4, unique=True)) if is_merging else [""]
    return Job(
        name=name,
        runtime=draw(NAMES.filter(lambda text: text != "dispatcher")),
        operator=draw(OPERATORS),
        config=draw(CONFIGS),
        inputs=tuple(sorted(inputs, key=lambda each: each.name)),
        execution=draw(st.sampled_from(Execution)),
        when=draw(st.sampled_from(InputCondition)) if triggers > 1 else InputCondition.ANY,
        update=update,
        unique_key=tuple(columns[1:]),
        version_by=draw(st.sampled_from(["", columns[0]])),
        delete_when=draw(st.sampled_from(["", "op = 'd'"])) if is_merging else "",
        max_queue_depth=depth,
        resume_queue_depth=draw(st.none() | st.integers(0, depth - 1)) if depth else None,
        max_queue_age_ms=age,
        resume_queue_age_ms=draw(st.none() | st.integers(0, age - 1)) if age else None,
        max_concurrency=draw(st.none() | st.integers(1, 1000)),
        timeout_ms=draw(MILLISECONDS),
        heartbeat_timeout_ms=draw(st.integers(1000, HEARTBEAT_MS_MAX)),
        max_attempts=draw(st.integers(1, 100)),
        retry=RetryPolicy(
            first, first + draw(st.integers(0, 10**6)), draw(st.sampled_from([1.0, 2.5]))
        ),
        merge_updates=draw(st.booleans()),
        coalesce=1 if is_untrusted else draw(st.integers(1, 1000)),
        untrusted=is_untrusted,
        secrets=draw(SECRETS),
        resources=draw(st.dictionaries(KEYS, SCALARS, max_size=2)),
    )


@st.composite
def dags(draw: st.DrawFn, *, most: int = 5) -> Dag:
    """A DAG of a few jobs: a source first, and then each reads from those before it."""
    names = draw(st.lists(NAMES, min_size=1, max_size=most, unique=True))
    datasets: list[str] = []
    jobs = []
    for number, name in enumerate(names):
        is_source = not datasets or draw(st.booleans())
        job = draw(_sources(name) if is_source else _reactive(name, datasets))
        least = 1 if is_source else 0
        called = draw(st.lists(NAMES, min_size=least, max_size=2, unique=True))
        same = len(called) == 1 and called[0] not in datasets and draw(st.booleans())
        kept = KEEPS if job.runs else st.none()
        is_divided = (
            job.runs
            and job.runtime != DISPATCHER_RUNTIME
            and job.coalesce == 1
            and job.update is not UpdateMode.MERGE
        )
        divided = st.sampled_from(["", "date_trunc('month', ts)"]) if is_divided else st.just("")
        has_files = job.runs and job.runtime != DISPATCHER_RUNTIME
        is_rewritten = has_files and job.update is not UpdateMode.APPEND
        maintained = MAINTAINED if is_rewritten else st.none()
        outputs = [
            OutputSpec(
                each,
                each if same else f"d{number}-{place}",
                draw(kept),
                draw(divided),
                draw(maintained),
                *(draw(DECLARED) if has_files and job.update is not UpdateMode.MERGE else ()),
            )
            for place, each in enumerate(sorted(called))
        ]
        if any(output.dataset in datasets for output in outputs):
            outputs = [replace(output, dataset=f"e{number}-{output.name}") for output in outputs]
        datasets += [output.dataset for output in outputs]
        jobs.append(replace(job, outputs=tuple(outputs)))
    found = Dag(tuple(sorted(jobs, key=lambda job: job.name)))
    readers = Graph(found).readers
    bulk = draw(st.sets(st.sampled_from([n for n in names if readers[n]] or [""])))
    return Dag(
        tuple(replace(j, priority=Priority.BULK) if j.name in bulk else j for j in found.jobs)
    )
