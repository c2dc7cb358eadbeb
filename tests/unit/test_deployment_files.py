"""The files of `deploy/` say nothing that Penstock does not know.

No container engine runs here, so nothing is started: images, commands, variables, ports, probes and
who may reach whom are read, and compared with what the code has.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import requires
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml

from penstock.cli import cli
from penstock.cli.deploy import fleets_of, kubernetes_manifests
from penstock.dispatcher.api.routes import PROBES
from penstock.runtimes.registry import RuntimeRegistry
from penstock.settings import Settings, read_settings
from tests.architecture.source import ROOT

DEPLOY = ROOT / "deploy"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = f"penstock:{VERSION}"
SETTINGS = {f"PENSTOCK_{each.name.upper()}" for each in fields(Settings)} | {"PENSTOCK_SETTINGS"}
DEFAULTS = Settings()
PORTS = {"public": DEFAULTS.port, "internal": DEFAULTS.internal_port} | {
    "webhook": DEFAULTS.webhook_port,
    "query": DEFAULTS.query_port,
}
UID = 10001
_FILLED = re.compile(r"\$\{(\w+):\?[^}]*\}")
_PROBED = re.compile(r"http://127\.0\.0\.1:(\d+)(/\w+)")


@dataclass(frozen=True)
class Container:
    """A container of ours, as any of the files describes one."""

    where: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ports: frozenset[int]
    probes: frozenset[tuple[int, str]]
    stop_seconds: float


def _yaml(path: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def _compose() -> Any:
    return _yaml(DEPLOY / "compose.yaml")[0]


def _manifests() -> list[Any]:
    """What the kustomization lists, and what `penstock deploy kubernetes` prints beside it."""
    listed = _yaml(DEPLOY / "kubernetes" / "kustomization.yaml")[0]["resources"]
    settings = Settings(runtimes={"process-big": {"uses": "process"}})
    fleets = fleets_of(
        settings, RuntimeRegistry(settings.runtimes), runtimes=(), workers_min=0, workers_max=3
    )
    return [
        *(each for name in listed for each in _yaml(DEPLOY / "kubernetes" / name)),
        *yaml.safe_load_all(kubernetes_manifests(fleets, namespace="penstock")),
    ]


def _kind(kind: str) -> list[Any]:
    return [each for each in _manifests() if each["kind"] == kind]


def _composed() -> Iterator[Container]:
    for name, service in _compose()["services"].items():
        if not service["image"].startswith("penstock") or service.get("entrypoint") == ["weed"]:
            continue
        tested = " ".join(service.get("healthcheck", {}).get("test", []))
        yield Container(
            where=f"compose.yaml: {name}",
            image=service["image"],
            command=tuple(service["command"]),
            environment={
                key: _FILLED.sub(r"\1-of-some-length", str(value))
                for key, value in service["environment"].items()
            },
            ports=frozenset(int(each.rpartition(":")[2]) for each in service.get("ports", ())),
            probes=frozenset((int(port), path) for port, path in _PROBED.findall(tested)),
            stop_seconds=float(service.get("stop_grace_period", "10s").removesuffix("s")),
        )


def _orchestrated() -> Iterator[Container]:
    shared = {each["metadata"]["name"]: each["data"] for each in _kind("ConfigMap")}
    tags = _yaml(DEPLOY / "kubernetes" / "kustomization.yaml")[0]["images"]
    tag = {each["name"]: each["newTag"] for each in tags}
    for deployment in _kind("Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        for each in pod["containers"]:
            environment: dict[str, str] = {}
            for source in each.get("envFrom", ()):
                environment |= shared[source["configMapRef"]["name"]]
            environment |= {one["name"]: one.get("value", "a-secret") for one in each["env"]}
            named = {one["name"]: one["containerPort"] for one in each.get("ports", ())}
            probes = [each[key]["httpGet"] for key in each if key.endswith("Probe")]
            yield Container(
                where=f"kubernetes: {deployment['metadata']['name']}",
                image=each["image"] if ":" in each["image"] else f"penstock:{tag['penstock']}",
                command=tuple(each["args"]),
                environment=environment,
                ports=frozenset(named.values()),
                probes=frozenset((named[one["port"]], one["path"]) for one in probes),
                stop_seconds=pod.get("terminationGracePeriodSeconds", 30),
            )


def _on_ecs() -> Iterator[Container]:
    for path in sorted((DEPLOY / "ecs").glob("*.json")):
        for each in json.loads(path.read_text())["containerDefinitions"]:
            said = {one["name"]: one["value"] for one in each["environment"]}
            tested = " ".join(each.get("healthCheck", {}).get("command", ()))
            yield Container(
                where=f"ecs/{path.name}: {each['name']}",
                image=each["image"],
                command=tuple(each["command"]),
                environment=said | {one["name"]: "a-secret" for one in each["secrets"]},
                ports=frozenset(one["containerPort"] for one in each.get("portMappings", ())),
                probes=frozenset((int(port), path) for port, path in _PROBED.findall(tested)),
                stop_seconds=each.get("stopTimeout", 30),
            )


CONTAINERS = [*_composed(), *_orchestrated(), *_on_ecs()]
every = pytest.mark.parametrize("container", CONTAINERS, ids=lambda each: each.where)


def _verb(words: tuple[str, ...]) -> click.Command:
    found: click.Command = cli
    for word in words:
        assert isinstance(found, click.Group), f"{word} follows a verb without verbs"
        below = found.get_command(click.Context(found), word)
        assert below is not None, f"there is no verb {word}"
        found = below
    return found


def _settings(container: Container) -> Settings:
    """The settings of a container, with secrets that differ."""
    ours = {name: said for name, said in container.environment.items() if said != "a-secret"}
    secret = {name: f"{name}-x" for name, said in container.environment.items() if name not in ours}
    ours.pop("PENSTOCK_SETTINGS", None)
    return read_settings({}, environment=ours | secret, folder=DEPLOY).settings


def test_every_way_has_every_part() -> None:
    parts = {("dispatcher",), ("worker",), ("source", "cron"), ("source", "webhook")}
    parts |= {("query-service",)}
    for way in (_composed, _orchestrated, _on_ecs):
        assert {each.command for each in way()} == parts


@every
def test_images_and_commands_are_ours(container: Container) -> None:
    assert container.image == IMAGE
    assert not isinstance(_verb(container.command), click.Group)


@every
def test_variables_are_settings_and_their_values_can_be_right(container: Container) -> None:
    said = {name for name in container.environment if name.startswith("PENSTOCK_")}
    assert said <= SETTINGS, said - SETTINGS
    settings = _settings(container)
    if container.command == ("source", "webhook"):
        # It faces others: what it holds opens nothing but events of webhook sources.
        secret = {name for name, said in container.environment.items() if said == "a-secret"}
        assert secret | {"PENSTOCK_WEBHOOK_TOKEN"} == {"PENSTOCK_WEBHOOK_TOKEN"}
        held = (settings.worker_secret, settings.api_token, settings.postgres)
        assert not any(held)
        assert "PENSTOCK_WEBHOOK_TOKEN" in said
        assert not settings.is_webhook_on_loopback
    elif container.command == ("query-service",):
        # It runs SQL of others: nothing of the installation is to be had there.
        assert not any((settings.worker_secret, settings.api_token, settings.postgres))
        assert settings.query_host == "0.0.0.0"
    else:
        # Without it each would make a secret of its own, and nobody would believe the other.
        assert settings.worker_secret
    if container.command == ("dispatcher",):
        assert settings.postgres, "it would start a Postgres of its own"
        assert settings.api_token
        assert settings.host == settings.internal_host == "0.0.0.0"
        assert urlsplit(settings.query_service).port == PORTS["query"]
    else:
        (address,) = settings.dispatchers
        assert urlsplit(address).port == PORTS["internal"]
        assert "PENSTOCK_POSTGRES" not in said, "only dispatchers need Postgres"
    if container.command in {("dispatcher",), ("worker",), ("query-service",)}:
        assert settings.store.startswith("s3://")


@every
def test_ports_and_probes_are_those_that_are_served(container: Container) -> None:
    serves = {
        ("dispatcher",): {PORTS["public"], PORTS["internal"]},
        ("source", "webhook"): {PORTS["webhook"]},
        ("query-service",): {PORTS["query"]},
    }.get(container.command, set())
    assert container.ports <= serves
    paths = {each.path for each in PROBES} if "dispatcher" in container.command else {"/healthz"}
    assert {port for port, _ in container.probes} <= serves
    assert {path for _, path in container.probes} <= paths
    assert bool(container.probes) == bool(serves), "what listens is probed"


@every
def test_a_container_is_not_killed_before_its_tasks_may_end(container: Container) -> None:
    if container.command == ("worker",):
        assert container.stop_seconds > _settings(container).stop_seconds


def test_dispatchers_in_a_cluster_live_by_one_probe_and_serve_by_another() -> None:
    (dispatcher,) = [
        each["spec"]["template"]["spec"]["containers"][0]
        for each in _kind("Deployment")
        if each["metadata"]["name"] == "dispatcher"
    ]
    # /readyz asks Postgres: a restart would not bring that back.
    assert dispatcher["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert dispatcher["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_pods_are_bounded_and_unprivileged_and_get_no_variables_of_services() -> None:
    for deployment in _kind("Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        # The service penstock-internal would be the variable PENSTOCK_INTERNAL_PORT.
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        is_query = deployment["metadata"]["name"] == "query"
        assert pod["securityContext"]["runAsUser"] == (0 if is_query else UID)
        for each in pod["containers"]:
            kept = ["SETUID", "SETGID", "KILL"] if is_query else []
            capabilities = each["securityContext"]["capabilities"]
            assert (capabilities["drop"], capabilities.get("add", [])) == (["ALL"], kept)
            assert each["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in each["resources"]["limits"]
            assert each["securityContext"]["readOnlyRootFilesystem"] is True
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            places = {one["mountPath"] for one in each["volumeMounts"]}
            assert "/var/lib/penstock" in places
            assert {one["name"] for one in each["volumeMounts"]} == {
                one["name"] for one in pod["volumes"]
            }


def test_labels_of_pods_are_those_that_are_selected() -> None:
    labels = [
        each["spec"]["template"]["metadata"]["labels"].items() for each in _kind("Deployment")
    ]
    for each in _kind("Deployment"):
        own = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"] == own
    for service in _kind("Service"):
        assert any(service["spec"]["selector"].items() <= each for each in labels)
    for policy in _kind("NetworkPolicy"):
        selected = policy["spec"]["podSelector"].get("matchLabels", {}).items()
        assert any(selected <= each for each in labels)


def test_the_internal_listener_has_a_service_of_its_own() -> None:
    ports = {
        each["metadata"]["name"]: {one["port"] for one in each["spec"]["ports"]}
        for each in _kind("Service")
    }
    assert ports == {
        "penstock": {PORTS["public"]},
        "penstock-internal": {PORTS["internal"]},
        "penstock-webhook": {PORTS["webhook"]},
        "penstock-query": {PORTS["query"]},
    }
    assert all("type" not in each["spec"] for each in _kind("Service")), "none is a load balancer"


def test_the_internal_listener_is_reached_by_workers_and_sources_alone() -> None:
    policies = [each["spec"] for each in _kind("NetworkPolicy")]
    assert {"podSelector": {}, "policyTypes": ["Ingress"]} in policies, "nobody by default"
    rules = [rule for each in policies for rule in each.get("ingress", ())]
    inside = [each for each in rules if PORTS["internal"] in {one["port"] for one in each["ports"]}]
    (rule,) = inside
    assert [one["port"] for one in rule["ports"]] == [PORTS["internal"]]
    (who,) = rule["from"]
    # With a selector of namespaces it would be pods of others.
    assert who.keys() == {"podSelector"}
    (components,) = who["podSelector"]["matchExpressions"]
    asking = {
        each["metadata"]["labels"]["app.kubernetes.io/component"] for each in _kind("Deployment")
    }
    assert set(components["values"]) == asking - {"dispatcher"}
    assert all(each["from"] and each["ports"] for each in rules), "no rule is for everybody"


def test_secrets_that_are_named_are_in_the_example_and_have_no_value_there() -> None:
    (example,) = _yaml(DEPLOY / "kubernetes" / "secret.example.yaml")
    assert all("CHANGE-ME" in each for each in example["stringData"].values())
    named = {
        (one["valueFrom"]["secretKeyRef"]["name"], one["valueFrom"]["secretKeyRef"]["key"])
        for each in _kind("Deployment")
        for container in each["spec"]["template"]["spec"]["containers"]
        for one in container["env"]
        if "valueFrom" in one
    }
    assert named == {(example["metadata"]["name"], key) for key in example["stringData"]}


def test_compose_starts_with_no_secret_that_others_know() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    named = re.findall(r"\$\{(\w+)([^}]*)\}", text)
    # Of the profile `webhook`: it is made when the rest runs, and nothing is known until then.
    named.remove(("PENSTOCK_WEBHOOK_TOKEN", ":-"))
    assert {name for name, _ in named} == {
        *("PENSTOCK_API_TOKEN", "PENSTOCK_WORKER_SECRET", "POSTGRES_PASSWORD", "S3_SECRET")
    }
    # Compose refuses to start without, and says so.
    assert all(rest.startswith(":?") for _, rest in named)
    for service in _compose()["services"].values():
        for key, value in service.get("environment", {}).items():
            if re.search("TOKEN|SECRET|PASSWORD", key):
                assert _FILLED.fullmatch(value) or value == "${PENSTOCK_WEBHOOK_TOKEN:-}", key


def test_the_file_of_settings_is_one() -> None:
    (text,) = [
        each["data"]["penstock.toml"]
        for each in _kind("ConfigMap")
        if "penstock.toml" in each["data"]
    ]
    assert set(tomllib.loads(text)) <= {each.name for each in fields(Settings)}


def test_compose_publishes_on_loopback_only_and_the_internal_listener_nowhere() -> None:
    services = _compose()["services"]
    published = {name: each["ports"] for name, each in services.items() if "ports" in each}
    assert published == {
        "dispatcher": [f"127.0.0.1:{PORTS['public']}:{PORTS['public']}"],
        "webhook": [f"127.0.0.1:{PORTS['webhook']}:{PORTS['webhook']}"],
    }
    near = {name for name, each in services.items() if "state" in each["networks"]}
    assert near == {"postgres", "s3", "dispatcher"}, "only dispatchers reach Postgres"
    query = services["query"]
    assert (query["user"], query["cap_drop"]) == ("0:0", ["ALL"])
    assert query["cap_add"] == ["SETUID", "SETGID", "KILL"]
    assert query["networks"] == ["internal"]
    assert _compose()["networks"]["internal"] == {"internal": True}


def test_compose_names_what_it_has() -> None:
    compose = _compose()
    for service in compose["services"].values():
        assert set(service["networks"]) <= compose["networks"].keys()
        assert service.get("depends_on", {}).keys() <= compose["services"].keys()
        volumes = {each.split(":")[0] for each in service.get("volumes", ())}
        kept = {each for each in volumes if not each.startswith(".")}
        assert kept <= compose["volumes"].keys()
        assert all((DEPLOY / each).exists() for each in volumes - kept)
    settings = _settings(next(each for each in CONTAINERS if each.command == ("worker",)))
    assert urlsplit(settings.store.partition("endpoint=")[2]).netloc == "s3:8333"
    assert "-s3.port=8333" in compose["services"]["s3"]["command"]
    assert f"-bucket={urlsplit(settings.store).netloc}" in compose["services"]["s3"]["command"]


@pytest.mark.parametrize(
    "path", sorted((DEPLOY / "ecs").glob("*.json")), ids=lambda each: each.name
)
def test_task_definitions_are_whole(path: Path) -> None:
    task = json.loads(path.read_text())
    assert task["networkMode"] == "awsvpc"
    assert task["family"] == f"penstock-{path.stem}"
    for each in task["containerDefinitions"]:
        assert each["essential"] is True
        assert each.get("stopTimeout", 30) <= 120, "the longest that Fargate waits"
        secret = {one["name"] for one in each["secrets"]}
        assert not secret & {one["name"] for one in each["environment"]}
        assert {"PENSTOCK_API_TOKEN", "PENSTOCK_WORKER_SECRET", "PENSTOCK_POSTGRES"}.isdisjoint(
            one["name"] for one in each["environment"]
        )


def _containerfile() -> str:
    return (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")


def test_the_image_has_what_it_copies_and_the_user_of_the_pods() -> None:
    text = _containerfile()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / each).exists() for each in sources), line
        allowed = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
        assert all(f"!{each}" in allowed for each in sources), "the context leaves it out"
    assert f"USER {UID}:{UID}" in text
    assert f"useradd --uid {UID}" in text
    assert 'ENTRYPOINT ["penstock"]' in text
    exposed = re.search(r"^EXPOSE (.*)$", text, re.MULTILINE)
    assert exposed is not None
    assert {int(each) for each in exposed[1].split()} == set(PORTS.values())


def test_nothing_is_built_or_locked_with_what_is_not_pinned() -> None:
    """pip takes what a build needs from a registry, unless it is there and isolation is off."""
    pins = (ROOT / "requirements" / "run.txt").read_text()
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert all(re.search(rf"^{re.escape(each)} ", pins, re.MULTILINE) for each in required)
    for name in ("deploy/Containerfile", "Makefile"):
        text = (ROOT / name).read_text().replace("\\\n", " ")
        commands = re.findall(r"\bpip (?:install|wheel) ([^&\n]*)", text)
        assert commands
        for each in commands:
            if "pyspark==$(SPARK)" in each:
                continue  # A release that somebody names, to test with: nothing is made of it.
            is_ours = "--no-deps" in each and "--no-build-isolation" in each
            assert is_ours or "--require-hashes" in each, f"{name}: pip {each}"


def test_the_image_has_the_clients_of_aws_with_all_that_they_need() -> None:
    found = re.search(r"/\^\(([^)]*)\)==/", _containerfile())
    assert found is not None
    kept = set(found[1].split("|"))
    pins = (ROOT / "requirements" / "dev.txt").read_text()
    assert kept <= set(re.findall(r"^([\w.-]+)==", pins, re.MULTILINE))
    needed, waiting = set(), {"boto3"}
    while waiting:
        needed |= waiting
        below = {
            each for name in waiting for each in requires(name) or () if "extra ==" not in each
        }
        waiting = {re.split(r"[\s<>=!;\[(~]", each)[0].lower() for each in below} - needed
    assert needed == kept
