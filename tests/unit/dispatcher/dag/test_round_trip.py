"""What is parsed, written and parsed again stays what it was; no text breaks the parser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.dispatcher.dag.canonical import canonical, content_hash, render
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.parser import parse, parse_stored
from penstock.protocol.problem import DagError
from tests.sizes import some
from tests.unit.dispatcher.dag.drawing import dags

EXAMPLE = (Path(__file__).parent / "example.yaml").read_text("utf-8")
DOCUMENTATION = Path(__file__).parents[4] / "docs" / "dag.md"


@given(dags())
@settings(deadline=None, max_examples=some(150))
def test_what_is_rendered_is_parsed_back(dag: Dag) -> None:
    again = parse(render(dag), "rendered.yaml")
    assert canonical(again) == canonical(dag)
    assert again == dag


@given(dags())
@settings(deadline=None, max_examples=some(150))
def test_the_canonical_form_is_parsed_back(dag: Dag) -> None:
    again = parse(canonical(dag).decode(), "stored.json")
    assert canonical(again) == canonical(dag)
    assert content_hash(again) == content_hash(dag)
    assert json.loads(canonical(dag))["jobs"].keys() == {job.name for job in dag.jobs}


@given(dags())
@settings(deadline=None, max_examples=50)
def test_the_order_of_jobs_and_edges_in_a_file_does_not_matter(dag: Dag) -> None:
    backwards = Dag(
        tuple(
            replace(job, inputs=job.inputs[::-1], outputs=job.outputs[::-1])
            for job in dag.jobs[::-1]
        )
    )
    assert parse(render(backwards), "backwards.yaml") == dag


def test_what_looks_back_merges_updates_and_stays_so() -> None:
    text = EXAMPLE.replace("[fetch.departures]", "[{from: departures, lookback: 36h}]")
    dag = parse(text, "back.yaml")
    (edge,) = dag.job("clean").inputs
    assert (edge.lookback_ms, dag.job("clean").merge_updates) == (36 * 3_600_000, True)
    assert "lookback: 1d12h" in render(dag)
    assert parse(render(dag), "rendered.yaml") == dag
    assert content_hash(dag) != content_hash(parse(EXAMPLE, "example.yaml"))


def test_what_reads_changes_runs_alone_and_stays_so() -> None:
    text = EXAMPLE.replace("[fetch.departures]", "[{from: departures, read: changes}]")
    dag = parse(text, "changes.yaml")
    assert dag.job("clean").max_concurrency == 1
    assert parse(render(dag), "rendered.yaml") == dag


def test_the_example_says_the_same_in_other_words() -> None:
    dag = parse(EXAMPLE, "example.yaml")
    other = (
        EXAMPLE.replace("10k", "10_000")
        .replace("86_400", "86400")
        .replace("30m", "0.5h")
        .replace("[hourly.ticks]", "ticks")
        .replace("1_700_000_000", "1700000000")
        .replace(
            "    priority: bulk\n", "    mode: pause\n    priority: 'bulk'\n    update: replace\n"
        )
        .replace("emits: interval", "time_zone: UTC\n      catch_up: true\n      emits: 'interval'")
    )
    assert other != EXAMPLE
    assert canonical(parse(other, "other.yaml")) == canonical(dag)
    assert content_hash(parse(other, "other.yaml")) == content_hash(dag)


def _stored(text: str) -> str:
    """The example as earlier releases have stored it: what is appended had to have a key."""
    key = "    update: append\n    unique_key: [day, airport]\n"
    return text.replace("    update: append\n", key)


def test_the_hash_of_a_version_stays_from_release_to_release() -> None:
    # Stored versions are compared by it. Change it only with a migration of those.
    assert content_hash(parse_stored(_stored(EXAMPLE), "example.yaml")) == (
        "0e59dee7abe04100fd99fead737fcdf2a33d473980eb13f26ccbdad0ba997a1f"
    )


def test_what_is_new_has_changed_no_hash_of_a_version_without_it() -> None:
    # The example as it could be written before there were intervals, and with them.
    unmerged = EXAMPLE.replace("    merge_updates: true\n", "")
    before = unmerged.replace("      emits: interval\n", "")
    assert content_hash(parse_stored(_stored(before), "before.yaml")) == (
        "e26e21e66450ecd3a312b7b86ecd578cacede380c6e3fda13f4472f89c3e29cb"
    )
    assert content_hash(parse_stored(_stored(unmerged), "unmerged.yaml")) == (
        "0314e8b48b115719fd982e16f9d1f74ab32d4632285161432d4fe686da651ff1"
    )


def test_a_stored_version_is_read_by_the_names_of_its_time() -> None:
    old = EXAMPLE.replace("merge_updates: true", "coalesce: true")
    assert parse_stored(old, "version 3") == parse(EXAMPLE, "example.yaml")
    assert parse_stored(EXAMPLE, "version 4") == parse(EXAMPLE, "example.yaml")
    assert (
        not parse_stored(old.replace("coalesce: true", "coalesce: false"), "3")
        .job("report")
        .merge_updates
    )
    with pytest.raises(DagError, match="What is appended has no key"):
        parse(_stored(EXAMPLE), "example.yaml")
    with pytest.raises(DagError, match="merge_updates: true now"):
        parse(old, "example.yaml")
    with pytest.raises(DagError, match="'yes' is not a count"):
        parse_stored(old.replace("coalesce: true", "coalesce: yes"), "version 3")


def test_the_documentation_has_the_example() -> None:
    assert f"```yaml\n{EXAMPLE}```" in DOCUMENTATION.read_text("utf-8")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1e5",
            "1_000",
            "010",
            "1:30",
            "yes",
            "no",
            "on",
            "null",
            "~",
            "",
            " x ",
            "0x1F",
            "=",
            "<<",
        ),
        *(
            "true",
            "2024-01-01",
            ".inf",
            "5.",
            "-",
            "*",
            "@x",
            "#",
            "a: b",
            "a #b",
            "\t",
            "\n",
            "a\n",
        ),
        *(
            "\r",
            "\x7f",
            "\x85",
            "\xa0",
            "a \u2028 b",
            "a \u2029 b",
            "\ufeff",
            "\ufffe",
            "\uffff",
            "\x01",
        ),
        *("\U0001f600", "\U0010ffff", "'", '"', "\\", "\\u0041", "x" * 3000, "a  b", "\ue000"),
    ],
)
def test_a_text_stays_itself(text: str) -> None:
    config = {"x": text, "y": [text]}
    dag = parse(EXAMPLE, "example.yaml")
    edited = [replace(job, config=config) if job.name == "fetch" else job for job in dag.jobs]
    for written in (render(Dag(tuple(edited))), canonical(Dag(tuple(edited))).decode()):
        assert parse(written, "again").job("fetch").config == config


def _never_breaks(text: str) -> None:
    found = _parsed(text)
    if isinstance(found, Dag):
        assert canonical(parse(canonical(found).decode(), "again")) == canonical(found)
        return
    assert found.problems
    lines = 2 + len(re.findall("[\n\r\x85\u2028\u2029]", text))
    for problem in found.problems:
        assert 1 <= problem.line <= lines
        assert problem.message.endswith((".", "?"))
    assert str(found).encode()


def _parsed(text: str) -> Dag | DagError:
    try:
        return parse(text, "any.yaml")
    except DagError as error:
        return error


@given(st.text())
@example("\ud800")
@example('"\\ud800"')
@example('"\\UFFFFFFFF"')
@example("%YAML 1." + "1" * 5000 + "\n---\na")
@example("%TAG")
@example("? [a]\n: b")
@example("{[a]: b}")
@example("&a [*a]")
@example("&a {*a : *a}")
@example("*a")
@example("!<")
@example("--- a\n--- b")
@example("jobs: *")
@example("\ufeffjobs: {}")
@example("jobs: {\u2028: 1}")
@settings(deadline=None, max_examples=some(200))
def test_any_text_is_a_dag_or_a_dag_error(text: str) -> None:
    _never_breaks(text)


_PIECES = st.sampled_from(
    [
        *("jobs:", "a:", "b: ", "{", "}", "[", "]", ",", ": ", "\n", "\n  ", "\n    ", "- ", "? "),
        *("&x ", "*x", "!!str ", "<<: ", "|\n", ">\n", "'", '"', "#", "\t", "~", "null", "true"),
        *("activation: source", "source:", "kind: cron", "cron: ", "@daily", "inputs: ", "a.b"),
        *("outputs: [a]", "where: ", "start > 1", "1e999", "10k", "5m", "runtime: process"),
        *("config:", "\\x00", "\x85", "é", "\U0001f600", "---\n", "...\n", "%YAML 1.1\n"),
    ]
)


@given(st.lists(_PIECES, max_size=25).map("".join))
@settings(deadline=None, max_examples=some(400))
def test_pieces_of_yaml_in_any_order_are_a_dag_or_a_dag_error(text: str) -> None:
    _never_breaks(text)


@given(
    st.integers(0, len(EXAMPLE)),
    st.integers(0, 40),
    st.text(max_size=5) | _PIECES,
)
@settings(deadline=None, max_examples=some(300))
def test_a_damaged_example_is_a_dag_or_a_dag_error(place: int, cut: int, put: str) -> None:
    _never_breaks(EXAMPLE[:place] + put + EXAMPLE[place + cut :])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        *("kind", "cron", "from", "as", "where", "name", "size", "first", "sql"),
                        *("trigger", "read", "keep", "partitions", "age", "sql_file", "lookback"),
                        *("maintain", "compact", "files", "below", "cluster", "after"),
                        *("columns", "storage", "buffered"),
                    ]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=5,
    ),
    st.sampled_from(
        [
            *("activation", "source", "inputs", "outputs", "priority", "runtime", "operator"),
            *(
                "config",
                "resources",
                "update",
                "unique_key",
                "version_by",
                "heartbeat_timeout",
                "retry",
            ),
            *("execution", "when", "merge_updates", "coalesce", "mode", "max_queue_depth"),
            *("max_queue_age", "timeout"),
        ]
    ),
    st.sampled_from(["hourly", "fetch", "days"]),
)
@settings(deadline=None, max_examples=some(300))
def test_any_value_of_any_field_is_a_dag_or_a_dag_error(
    value: object, field: str, job: str
) -> None:
    said = json.loads(canonical(parse(EXAMPLE, "example.yaml")))
    said["jobs"][job][field] = value
    _never_breaks(json.dumps(said, ensure_ascii=False))


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "--- ~\n"])
def test_an_empty_file_says_so(text: str) -> None:
    with pytest.raises(DagError) as caught:
        parse(text, "empty.yaml")
    (problem,) = caught.value.problems
    assert problem.message.startswith("It is empty; write")
