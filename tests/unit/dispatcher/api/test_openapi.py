"""What the OpenAPI documents say of the tables."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.dispatcher.api.endpoints import PARAMETER, ApiEndpoint, RequiredProof, document
from penstock.dispatcher.api.routes import INTERNAL, PROBES, PUBLIC

TABLES = {"internal": (*INTERNAL, *PROBES), "public": (*PUBLIC, *PROBES)}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> tuple[ApiEndpoint, ...]:
    return TABLES[request.param]


def operations(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, methods in found["paths"].items()
        for method, operation in methods.items()
    }


def test_every_endpoint_is_described_once(table: tuple[ApiEndpoint, ...]) -> None:
    found = operations(document("Title", table))
    expected = [(each.method, PARAMETER.sub(r"{\1}", each.path)) for each in table]
    assert sorted(found) == sorted(expected)
    ids = [each["operationId"] for each in found.values()]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_somewhere(table: tuple[ApiEndpoint, ...]) -> None:
    found = document("Title", table)
    text = json.dumps(found)
    for name in text.split('"#/components/schemas/')[1:]:
        assert name.split('"')[0] in found["components"]["schemas"]


def test_parameters_of_paths_are_declared(table: tuple[ApiEndpoint, ...]) -> None:
    for (_, path), operation in operations(document("Title", table)).items():
        declared = {each["name"]: each for each in operation.get("parameters", [])}
        in_path = {name for name, each in declared.items() if each["in"] == "path"}
        assert in_path == {name for name, _ in PARAMETER.findall(path)}
        assert all(declared[name]["required"] for name in in_path)
        assert "null" not in json.dumps([each["schema"] for each in declared.values()])


def test_what_may_go_wrong_is_told() -> None:
    found = operations(document("Title", TABLES["internal"]))
    claim = found["POST", "/internal/task-claim"]
    expected = "200 400 401 403 404 408 409 413 422 503"
    assert sorted(claim["responses"]) == expected.split()
    problem = claim["responses"]["409"]["content"]["application/problem+json"]["schema"]
    assert problem == {"$ref": "#/components/schemas/Problem"}
    assert claim["security"] == [{"worker": [], "workerToken": []}, {"taskToken": []}]
    complete = found["POST", "/v1/task/complete"]
    assert {"200", "207", "401", "403"} <= set(complete["responses"])
    # Each entry of the body has its own, unless there is one only.
    assert complete["security"] == [{"taskToken": []}, {}]
    assert found["POST", "/v1/task/events"]["security"] == [{"taskToken": []}]
    assert sorted(found["GET", "/readyz"]["responses"]) == ["200", "503"]


def test_the_listeners_share_only_the_probes() -> None:
    internal = {each.path for each in TABLES["internal"]}
    public = {each.path for each in TABLES["public"]}
    assert internal & public == {"/healthz", "/readyz"}
    for path in public:
        assert not path.startswith(("/internal", "/v1/task/"))
    for path in internal - {"/healthz", "/readyz"}:
        assert path.startswith(("/internal/", "/v1/task/"))


def test_who_has_to_prove_what() -> None:
    workers = {RequiredProof.WORKER, RequiredProof.SOURCE, RequiredProof.WORKER_OR_INVOCATION}
    for each in INTERNAL:
        if each.path == "/internal/jwks/task":
            assert each.proof is RequiredProof.NONE
        elif each.path.startswith("/internal/query/"):
            # By whom a query is, whoever runs it.
            assert each.proof in {RequiredProof.QUERY, RequiredProof.QUERY_END}, each.path
        elif each.path.startswith("/internal/"):
            assert each.proof in workers, each.path
        else:
            assert each.path.startswith("/v1/task/")
            assert each.proof in {RequiredProof.TASK, RequiredProof.EACH_TASK}, each.path
    looking = {each for each in PUBLIC if each.proof is RequiredProof.LOOKING}
    assert {each.method for each in looking} == {"GET"}
    reading = {each for each in PUBLIC if each.proof is RequiredProof.READING}
    assert {each.path for each in reading} == {"/v1/query"}
    others = [each for each in PUBLIC if each not in looking | reading]
    assert all(each.proof is RequiredProof.API_TOKEN for each in others)


def test_the_headers_of_proofs_are_described() -> None:
    schemes = document("Title", TABLES["internal"])["components"]["securitySchemes"]
    assert sorted(schemes) == ["queryToken", "taskToken", "worker", "workerToken"]
    assert schemes["taskToken"]["name"] == "X-Trace-Task-Capability"
    public = document("Title", TABLES["public"])["components"]["securitySchemes"]
    assert sorted(public) == ["apiToken", "readToken", "viewerToken"]
