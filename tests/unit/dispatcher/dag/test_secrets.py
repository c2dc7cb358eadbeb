"""`untrusted` and `secrets` of a job: what is read, what is refused, and what is never repeated."""

from __future__ import annotations

import pytest

from penstock.dispatcher.dag.canonical import (
    canonical,
    content_hash,
    definition_hash,
    diff,
    plain_job,
    render,
    show,
)
from penstock.dispatcher.dag.model import Dag, Runtimes
from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.dag.secrets import SecretKind, SecretReference, secret_reference
from penstock.dispatcher.runtime_registry import RegisteredRuntimes
from penstock.protocol.problem import DagDiagnostic, DagError
from penstock.runtimes.registry import RuntimeRegistry

HEAD = """\
jobs:
  s:
    activation: source
    source: {kind: manual}
    outputs: [raw]
  a:
    runtime: process
    operator: m:f
    inputs: [raw]
    outputs: [a]
"""
BUILT_IN = RegisteredRuntimes(RuntimeRegistry(installed=[]))
VALUE = "sk-live-0123456789"


def read(more: str = "", *, runtimes: Runtimes | None = None) -> Dag:
    return parse(HEAD + more, "dag.yaml", runtimes=runtimes or BUILT_IN)


def problems(text: str, *, runtimes: Runtimes | None = None) -> tuple[DagDiagnostic, ...]:
    with pytest.raises(DagError) as caught:
        parse(text, "dag.yaml", runtimes=runtimes or BUILT_IN)
    assert VALUE not in str(caught.value)
    return caught.value.problems


def problem(more: str, *, head: str = HEAD) -> tuple[int, str, str]:
    (found,) = problems(head + more)
    return found.line, found.field, found.message


def test_both_fields_are_read_written_and_read_again() -> None:
    dag = read(
        "    untrusted: true\n"
        "    secrets: {API_KEY: env:SHOP_KEY, db: aws:penstock/db#password, cert: file:cert.pem}\n"
    )
    job = dag.job("a")
    assert job.untrusted
    assert job.secrets == {
        "API_KEY": "env:SHOP_KEY",
        "db": "aws:penstock/db#password",
        "cert": "file:cert.pem",
    }
    assert parse(render(dag), "dag.yaml") == parse(canonical(dag).decode(), "dag.yaml") == dag
    assert "process m:f; writes a; secrets API_KEY, cert, db; untrusted\n" in show(dag)


def test_a_dag_without_them_has_the_hash_that_it_had() -> None:
    dag = read()
    assert "secrets" not in plain_job(dag.job("a"))
    assert "untrusted" not in plain_job(dag.job("a"))
    assert read("    untrusted: false\n    secrets: {}\n") == dag
    assert content_hash(dag) == "d322842129cab9762a57f6148fd3b65f058f2011ea0e90033f78b248a3b43c90"


def test_a_change_of_them_is_one_of_the_dag_that_rebuilds_nothing() -> None:
    before = read()
    after = read("    untrusted: true\n    secrets: {K: env:K}\n")
    found = diff(before, after)
    assert found.changed["a"].fields == ("secrets", "untrusted")
    assert found.changed["a"].keeps_generation
    assert definition_hash(before.job("a")) == definition_hash(after.job("a"))
    assert content_hash(before) != content_hash(after)
    moved = read("    untrusted: true\n    secrets: {K: file:K}\n")
    assert diff(after, moved).changed["a"].fields == ("secrets",)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("env:KEY", SecretReference(SecretKind.ENV, "KEY")),
        ("env:_k9", SecretReference(SecretKind.ENV, "_k9")),
        ("env:MY_AWS_KEY", SecretReference(SecretKind.ENV, "MY_AWS_KEY")),
        ("file:a", SecretReference(SecretKind.FILE, "a")),
        ("file:tls.key-2", SecretReference(SecretKind.FILE, "tls.key-2")),
        ("aws:penstock/shop@1", SecretReference(SecretKind.AWS, "penstock/shop@1")),
        ("aws:p/d#user name", SecretReference(SecretKind.AWS, "p/d", "user name")),
    ],
)
def test_references_are_read(text: str, place: SecretReference) -> None:
    assert secret_reference(text) == place
    assert str(place) == text


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (VALUE, "does not say where the secret is; write env:VARIABLE, file:NAME, aws:ID"),
        (f"vault:{VALUE}", "and never the secret itself"),
        (f"env:{VALUE}", "names no variable after env:"),
        ("'env:'", "names no variable after env:"),
        ("env:A B", "names no variable"),
        ("env:PENSTOCK_WORKER_SECRET", "those are the worker's own, and no job gets them"),
        ("env:AWS_SECRET_ACCESS_KEY", "begins with PENSTOCK_ or AWS_"),
        ("env:aws_session_token", "begins with PENSTOCK_ or AWS_"),
        (f"file:../{VALUE}", "names no file after file:"),
        ("file:/etc/shadow", "names no file after file:"),
        ("file:..", "names no file after file:"),
        ("file:.hidden", "names no file after file:"),
        ("'file:a\\b'", "names no file after file:"),
        ("aws:arn:aws:secretsmanager:eu-west-1:1:secret:penstock/x-AbCdEf", "has an ARN"),
        ("aws:penstock/a b", "names no secret of AWS Secrets Manager"),
        ("aws:penstock/ä", "names no secret of AWS Secrets Manager"),
        ("aws:penstock/db#", "names no field after #"),
        ("aws:penstock/db#a#b", "names no field after #"),
        ("[env:A]", "It is not where a secret is"),
        ("{from: env:A}", "It is not where a secret is"),
        ("", "It is empty"),
    ],
)
def test_what_is_no_reference_is_refused_with_its_line_and_not_repeated(
    said: str, words: str
) -> None:
    line, field, message = problem(f"    secrets:\n      K: {said}\n")
    assert (line, field) == (12, "jobs.a.secrets.K")
    assert words in message


@pytest.mark.parametrize("name", ["api-key", "9A", "a b", "'a.b'", "ä", "K" * 65])
def test_a_name_has_to_be_an_identifier(name: str) -> None:
    line, field, message = problem(f"    secrets:\n      {name}: env:A\n")
    assert line == 12
    assert field == f"jobs.a.secrets.{name.strip(chr(39))}"
    assert "cannot be the name of a secret; write letters, digits and _" in message


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("secrets: env:A", "It is a text; write fields"),
        ("secrets: [env:A]", "It is a list; write fields"),
        ("secrets: {K: env:A, K: env:B}", "It is given twice"),
        ("secrets: {" + ", ".join(f"K{n}: env:A" for n in range(33)) + "}", "a job may have 32"),
        ("untrusted: maybe", "'maybe' is neither true nor false"),
        ("untrusted: 'true'", "'true' is neither true nor false"),
        ("secret: {K: env:A}", "Did you mean secrets?"),
    ],
)
def test_what_has_not_the_form_is_refused(said: str, words: str) -> None:
    line, _, message = problem(f"    {said}\n")
    assert line == 11
    assert words in message


def test_untrusted_tasks_are_never_run_as_one() -> None:
    line, field, message = problem("    untrusted: true\n    coalesce: 2\n")
    assert (line, field) == (12, "jobs.a.coalesce")
    assert "share their credentials" in message
    read("    untrusted: true\n    coalesce: 1\n")


SPARK = HEAD.replace("runtime: process", "runtime: spark").replace("m:f", "spark.OPERATOR")
PYTHON = SPARK.replace("OPERATOR", "python") + "    config: {transform: m:f}\n"
LAMBDA = HEAD.replace("runtime: process", "runtime: lambda").replace("m:f", "m.f")
RANGES = HEAD.replace("runtime: process", "runtime: dispatcher").replace(
    "operator: m:f", "operator: range_split\n    config: {size: 10}"
)


def test_untrusted_code_runs_where_it_can_be_kept_apart() -> None:
    for head, words in (
        (PYTHON, "share a session that has the worker's own rights"),
        (RANGES, "range_split is the dispatcher's own code"),
    ):
        _, field, message = problem("    untrusted: true\n", head=head)
        assert field == "jobs.a.untrusted"
        assert words in message
    parse(LAMBDA + "    untrusted: true\n", "dag.yaml", runtimes=BUILT_IN)


def test_what_a_runtime_is_decides_and_not_its_name() -> None:
    runtimes = RegisteredRuntimes(
        RuntimeRegistry(
            {"process-big": {"uses": "process"}, "quick": {"uses": "spark"}}, installed=()
        )
    )
    more = "    untrusted: true\n    secrets: {K: env:K}\n"
    parse(HEAD.replace("process", "process-big") + more, "dag.yaml", runtimes=runtimes)
    quick = PYTHON.replace("runtime: spark", "runtime: quick")
    (found,) = problems(quick + more, runtimes=runtimes)
    assert "Tasks of the runtime quick share a session" in found.message


def test_secrets_are_for_code_that_can_ask_for_them() -> None:
    sql = SPARK.replace("OPERATOR", "sql") + "    config: {sql: SELECT 1 AS a}\n"
    for head, words in (
        (LAMBDA, "has its secrets from its own configuration; name those of m.f there"),
        (RANGES, "runs inside the dispatcher and uses no secrets"),
        (sql, "spark.sql runs no code of yours that could use secrets"),
    ):
        _, field, message = problem("    secrets: {K: env:K}\n", head=head)
        assert field == "jobs.a.secrets"
        assert words in message
    parse(PYTHON + "    secrets: {K: env:K}\n", "dag.yaml", runtimes=BUILT_IN)


@pytest.mark.parametrize("field", ["secrets: {K: env:K}", "untrusted: true"])
def test_a_source_that_runs_nothing_has_neither(field: str) -> None:
    (found,) = problems(HEAD.replace("    outputs: [raw]\n", f"    outputs: [raw]\n    {field}\n"))
    assert found.field == f"jobs.s.{field.partition(':')[0]}"
    assert "only emits events and runs nothing; take" in found.message
    running = HEAD.replace(
        "source: {kind: manual}",
        f"source: {{kind: always_on}}\n    runtime: process\n    operator: m:g\n    {field}",
    )
    parse(running, "dag.yaml", runtimes=BUILT_IN)
