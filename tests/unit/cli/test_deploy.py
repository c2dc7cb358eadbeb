"""`penstock deploy`: the workers of each runtime, as Kubernetes and CloudFormation read them.

Neither is here: what is printed is parsed, and compared with the settings, with what dispatchers
tell autoscalers, and, by `tests/unit/test_deployment_files.py`, with the rules of deploy/.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator

from penstock.cli import run
from penstock.dispatcher.cloudwatch import NAMESPACE, metric_data
from penstock.protocol.steering import OperatorsAnswer
from tests.integration.dispatcher.test_cloudwatch import figures

SETTINGS = """
store = "s3://lake/penstock"
dispatchers = ["http://inside:7071"]
concurrency = 2
worker_secret = "a-secret-of-workers-0123456789"
api_token = "a-token-of-the-api-0123456789"
postgres = "postgresql://u:a-password-0123456789@db/p"
aws_region = "eu-central-1"

[runtimes.process-big]
uses = "process"
image = "registry.example/big: \\"7\\" #x"
command = ["worker", "--name", "$(HOME) yes"]
resources = {memory = "4GiB", cpu = 2}

[runtimes._on]
uses = "process"

[runtimes.quick]
uses = "spark"
driver_memory = "6g"
"""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SETTINGS", "STORE", "DISPATCHERS", "CONCURRENCY", "QUEUES"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text(SETTINGS)
    return tmp_path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(*words: str) -> str:
        assert run(["deploy", *words]) == 0
        text = capsys.readouterr().out
        for secret in ("a-secret-of", "a-token-of", "a-password"):
            assert secret not in text
        return text

    return ask


def _kinds(text: str, kind: str) -> dict[str, Any]:
    every = [each for each in yaml.safe_load_all(text) if each["kind"] == kind]
    return {each["metadata"]["name"]: each for each in every}


def _properties(text: str, kind: str) -> dict[str, Any]:
    found = json.loads(text)["Resources"]
    return {
        name: each["Properties"] for name, each in found.items() if each["Type"] == f"AWS::{kind}"
    }


def test_kubernetes_has_a_deployment_and_its_scaling_for_each_queue(printed: Any) -> None:
    text = printed("kubernetes", "--workers-max", "7", "--namespace", "lake")
    deployments, scaled = _kinds(text, "Deployment"), _kinds(text, "ScaledObject")
    assert deployments.keys() == scaled.keys()
    for each in yaml.safe_load_all(text):
        # As Kubernetes wants the names of what it makes of them, too.
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", each["metadata"]["name"])
        assert each["metadata"]["namespace"] == "lake"
    by_queue = {}
    for name, each in deployments.items():
        (container,) = each["spec"]["template"]["spec"]["containers"]
        environment = {one["name"]: one.get("value") for one in container["env"]}
        assert all(isinstance(one, str | None) for one in environment.values())
        by_queue[environment["PENSTOCK_QUEUES"]] = container
        asked = scaled[name]["spec"]
        (trigger,) = asked["triggers"]
        assert asked["scaleTargetRef"] == {"name": name}
        assert (asked["minReplicaCount"], asked["maxReplicaCount"]) == (0, 7)
        # What a worker runs at a time: the wanted number is divided by it.
        assert trigger["metadata"]["targetValue"] == environment["PENSTOCK_CONCURRENCY"] == "2"
        field, _, queue = trigger["metadata"]["valueLocation"].partition(".")
        assert (queue, hasattr(OperatorsAnswer(operators=[]), field)) == (
            environment["PENSTOCK_QUEUES"],
            True,
        )
        assert trigger["metadata"]["url"] == "http://penstock.lake.svc:7070/v1/operators"
    assert by_queue.keys() == {"default", "process-big", "_on", "quick"}
    big = by_queue["process-big"]
    assert big["image"] == 'registry.example/big: "7" #x'
    # Kubernetes would put a variable in the place of $(HOME).
    assert big["args"] == ["worker", "--name", "$$(HOME) yes"]
    assert big["resources"]["requests"] == {"cpu": "4000m", "memory": f"{2 * 4096 + 512}Mi"}
    assert by_queue["quick"]["resources"]["limits"] == {"memory": f"{2 * 6 * 1024 + 512}Mi"}
    assert by_queue["_on"]["image"].startswith("penstock:")


def test_ecs_has_a_service_and_its_scaling_for_each_queue(printed: Any) -> None:
    text = printed("ecs", "--workers-max", "7")
    definitions = _properties(text, "ECS::TaskDefinition")
    services = _properties(text, "ECS::Service")
    targets = _properties(text, "ApplicationAutoScaling::ScalableTarget")
    policies = _properties(text, "ApplicationAutoScaling::ScalingPolicy")
    assert len(definitions) == len(services) == len(targets) == len(policies) == 4
    whole = json.loads(text)
    assert all(re.fullmatch(r"[A-Za-z0-9]{1,255}", name) for name in whole["Resources"])
    named = set(re.findall(r'"Ref": "([^"]*)"', text)) - {"AWS::Region"}
    assert named <= whole["Parameters"].keys() | whole["Resources"].keys()
    assert {one["TaskDefinition"]["Ref"] for one in services.values()} == definitions.keys()
    queues = set()
    for each in policies.values():
        assert each["ScalingTargetId"]["Ref"] in targets
        config = each["TargetTrackingScalingPolicyConfiguration"]
        assert config["TargetValue"] == 2
        wanted = config["CustomizedMetricSpecification"]["Metrics"][0]["MetricStat"]["Metric"]
        assert wanted["Namespace"] == NAMESPACE
        (dimension,) = wanted["Dimensions"]
        queues.add(dimension["Value"])
        sent = {
            (one["MetricName"], *(name["Name"] for name in one["Dimensions"]))
            for one in metric_data(replace(figures(), queues={"default": 3}))
        }
        assert (wanted["MetricName"], dimension["Name"]) in sent, "dispatchers send no such figure"
    assert queues == {"default", "process-big", "_on", "quick"}
    containers = {each["Family"]: each["ContainerDefinitions"][0] for each in definitions.values()}
    big = containers["penstock-worker-process-big"]
    assert big["Image"] == 'registry.example/big: "7" #x'
    assert big["Command"] == ["worker", "--name", "$(HOME) yes"]
    environment = {one["Name"]: one["Value"] for one in big["Environment"]}
    assert environment["PENSTOCK_STORE"] == "s3://lake/penstock"
    assert environment["PENSTOCK_DISPATCHERS"] == "http://inside:7071"
    assert environment["AWS_REGION"] == "eu-central-1"
    assert [one["Name"] for one in big["Secrets"]] == ["PENSTOCK_WORKER_SECRET"]
    assert all(each["MinCapacity"] == 1 for each in targets.values())


def test_what_ecs_gets_has_the_shapes_of_the_services(printed: Any) -> None:
    text = printed("ecs")
    for each in _properties(text, "ECS::TaskDefinition").values():
        _check("ecs", "RegisterTaskDefinition", _camel(_resolved(each)))
    for each in _properties(text, "ApplicationAutoScaling::ScalableTarget").values():
        _check("application-autoscaling", "RegisterScalableTarget", _resolved(each))
    for each in _properties(text, "ApplicationAutoScaling::ScalingPolicy").values():
        # The template names the target; a request would name what it is of.
        said = {name: one for name, one in _resolved(each).items() if name != "ScalingTargetId"}
        placed = {"ServiceNamespace": "ecs", "ResourceId": "service/a/b"}
        placed["ScalableDimension"] = "ecs:service:DesiredCount"
        _check("application-autoscaling", "PutScalingPolicy", said | placed)


def _check(service: str, operation: str, said: Any) -> None:
    model = botocore.session.get_session().get_service_model(service)
    report = ParamValidator().validate(said, model.operation_model(operation).input_shape)
    assert not report.has_errors(), report.generate_report()


def _resolved(value: Any) -> Any:
    """A value with a text wherever CloudFormation would put one."""
    if isinstance(value, dict):
        is_reference = value.keys() <= {"Ref", "Fn::GetAtt", "Fn::Join"}
        return "x" if is_reference else {name: _resolved(each) for name, each in value.items()}
    return [_resolved(each) for each in value] if isinstance(value, list) else value


def _camel(value: Any) -> Any:
    """CloudFormation capitalizes what the requests of ECS do not."""
    if isinstance(value, dict):
        return {f"{name[0].lower()}{name[1:]}": _camel(each) for name, each in value.items()}
    return [_camel(each) for each in value] if isinstance(value, list) else value


def test_some_runtimes_alone(printed: Any) -> None:
    text = printed("kubernetes", "process-big", "--concurrency", "1")
    assert list(_kinds(text, "Deployment")) == ["worker-process-big"]


@pytest.mark.parametrize(
    ("words", "settings", "sentence"),
    [
        ("kubernetes proces", "", "No workers run 'proces'"),
        ("kubernetes --workers-min 9 --workers-max 3", "", "9 workers at least are more than 3"),
        ("kubernetes --namespace A_b", "", "'A_b' is no name of a namespace"),
        (
            "kubernetes",
            "".join(
                f'[runtimes.{name}]\nuses = "process"\nqueue = "q"\nimage = "of-{name}"\n'
                for name in "ab"
            ),
            "The runtimes a and b share the queue q, and so workers, and have more than one image",
        ),
        ("ecs", "", "store is a folder of this machine"),
        ("ecs", 'store = "s3://lake"', "dispatchers is not set"),
        (
            "ecs",
            'store = "s3://lake"\ndispatchers = ["http://d"]\nspark = "sc://h/;token=xyz"',
            "spark holds a secret",
        ),
        (
            "ecs --concurrency 100",
            'store = "s3://l"\ndispatchers = ["http://d"]\n[runtimes.process.resources]\ncpu = 1',
            "a task of Fargate has 16 and 120 at most",
        ),
    ],
)
def test_what_cannot_be_started_is_one_sentence(
    somewhere: Path, capsys: pytest.CaptureFixture[str], words: str, settings: str, sentence: str
) -> None:
    (somewhere / "penstock.toml").write_text(settings)
    assert run(["deploy", *words.split()]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
