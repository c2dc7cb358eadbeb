"""`penstock deploy`: print what starts the workers of each runtime, and scales them.

A fleet is of a queue, since that is what a worker serves (`Settings.queues`), and of all runtimes
whose tasks wait there. Runtimes of one queue have one image and one command, or none is made. Pure:
functions of settings and the registry. Nothing of a secret is in a fleet.

Fleets as one template of CloudFormation: services of ECS on Fargate. Pure.

Of each fleet a task definition, a service, and its scaling: target tracking keeps the figure
`Desired` that dispatchers of the profile `aws` send to CloudWatch for the queue, divided by the
tasks of the service that run, at what a worker runs at a time. Accounts, networks, roles and
secrets are parameters of the template, and no value of a secret is in it.

Fleets as manifests of Kubernetes, for the namespace that deploy/kubernetes makes. Pure.

Workers read the ConfigMaps `penstock-settings` and `penstock-file` and the Secret `penstock`. They
are scaled by KEDA, which asks the dispatcher itself how many tasks of the queue should run
(`queues` of `GET /v1/operators`) and divides by what a worker runs at a time. A plain
HorizontalPodAutoscaler cannot ask for that without a server of metrics in between, and never goes
to zero.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final

import click
import yaml

from penstock.cli.installation import Verb, set_by, settings_of, wiring
from penstock.cli.settings import shown_value
from penstock.dispatcher.cloudwatch import DESIRED, NAMESPACE
from penstock.kernel.errors import InvalidInput
from penstock.kernel.text import nearest
from penstock.kernel.units import memory_bytes
from penstock.runtimes.base import Delivery
from penstock.runtimes.registry import Placement, RuntimeRegistry
from penstock.runtimes.spark.settings import SparkSettings, heap_bytes
from penstock.settings import InstallationProfile, Settings, variables_of

_MIB: Final = 1024**2
_WORKER_BYTES: Final = 512 * _MIB
"""What the worker itself needs."""
_TASK_BYTES: Final = 512 * _MIB
_TASK_CPU: Final = 0.25
"""What a task gets whose runtime does not say."""
_NAME_CHARACTERS_MAX: Final = 40
LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""What Kubernetes takes as the name of a namespace, or in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFleet:
    """The workers of a queue."""

    queue: str
    image: str
    command: tuple[str, ...]
    """What follows the image's entry point, `penstock`."""
    concurrency: int
    stop_seconds: float
    memory_bytes: int
    cpu: float
    workers_min: int
    workers_max: int

    @property
    def name(self) -> str:
        """What it is called where names are DNS labels: two queues never share a name."""
        plain = self.queue.replace("_", "-").strip("-")[:_NAME_CHARACTERS_MAX].strip("-")
        if plain == self.queue and LABEL.fullmatch(plain):
            return f"worker-{plain}"
        digest = hashlib.sha256(self.queue.encode()).hexdigest()[:8]
        return "-".join(filter(None, ("worker", plain, digest)))

    def variables(self) -> dict[str, str]:
        """What its workers are set to, besides what all processes share."""
        return {
            "PENSTOCK_QUEUES": self.queue,
            "PENSTOCK_CONCURRENCY": str(self.concurrency),
            "PENSTOCK_STOP_SECONDS": f"{self.stop_seconds:g}",
        }


def fleets_of(
    settings: Settings,
    registry: RuntimeRegistry,
    *,
    runtimes: Sequence[str],
    workers_min: int,
    workers_max: int,
) -> list[WorkerFleet]:
    """The fleets of these runtimes, or of all of them, by the names of their queues."""
    if workers_min > workers_max:
        raise InvalidInput(f"{workers_min} workers at least are more than {workers_max} at most.")
    served = {
        name: registry.placement(name, {})
        for name in registry.names()
        if registry.runtime(name).delivery is Delivery.WAKE
    }
    for name in runtimes:
        if name not in served:
            near = nearest(name, served)
            raise InvalidInput(
                f"No workers run {name!r}; they run {', '.join(served)}.",
                hint=f"Did you mean {near}?" if near else "Register it in the settings.",
            )
    wanted = {served[name].queue for name in runtimes} or {each.queue for each in served.values()}
    made = []
    for queue in sorted(wanted):
        of_queue = {name: each for name, each in served.items() if each.queue == queue}
        made.append(
            WorkerFleet(
                queue=queue,
                image=_one("image", queue, of_queue) or f"penstock:{version('penstock')}",
                command=_one("command", queue, of_queue) or ("worker",),
                concurrency=settings.concurrency,
                stop_seconds=settings.stop_seconds,
                memory_bytes=_WORKER_BYTES + max(_memory(settings, registry, of_queue)),
                cpu=max(_cpu(each, settings.concurrency) for each in of_queue.values()),
                workers_min=workers_min,
                workers_max=workers_max,
            )
        )
    return made


def _one(field: str, queue: str, placements: dict[str, Placement]) -> Any:
    """What the runtimes of a queue say of their workers, which are the same for all of them."""
    said = {name: found for name, each in placements.items() if (found := getattr(each, field))}
    if len(set(said.values())) > 1:
        raise InvalidInput(
            f"The runtimes {' and '.join(sorted(said))} share the queue {queue}, and so workers,"
            f" and have more than one {field}.",
            hint=f"Give one of them a queue of its own, or all of them the same {field}.",
        )
    return next(iter(said.values()), None)


def _memory(
    settings: Settings, registry: RuntimeRegistry, placements: dict[str, Placement]
) -> Iterable[int]:
    for name, each in placements.items():
        if registry.uses(name) == "spark":
            table = settings.runtimes.get(name, {})
            # As much again as the heap: Python's workers are beside the JVM.
            yield 2 * heap_bytes(table.get("driver_memory", SparkSettings().driver_memory))
        else:
            said = each.resources.get("memory")
            found = _TASK_BYTES if said is None else memory_bytes(said)
            if found is None:
                raise InvalidInput(
                    f"The runtime {name} has {str(said)[:100]!r} as memory.",
                    hint="Write how much, as in 512MiB or 2GiB.",
                )
            yield settings.concurrency * found


def _cpu(placement: Placement, concurrency: int) -> float:
    said = placement.resources.get("cpu", _TASK_CPU)
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 < said < math.inf:
        raise InvalidInput(f"{str(said)[:100]!r} is no number of CPUs; write it as 2 or 0.5.")
    return float(said) * concurrency


_SHARED: Final = (
    *("profile", "store", "wakeups", "sqs_prefix", "aws_region", "aws_endpoint"),
    *("secrets_prefix", "spark", "dispatchers"),
)
"""The settings of a worker that all workers of an installation share, and that are no secrets."""


def _workers(least: int, *settings: str) -> Callable[[Verb], Verb]:
    def decorate(verb: Verb) -> Verb:
        verb = set_by("concurrency", *settings, is_logging=False)(verb)
        verb = click.option(
            "--workers-max",
            type=click.IntRange(1, 5000),
            default=10,
            show_default=True,
            help="Maximum workers of a fleet.",
        )(verb)
        verb = click.option(
            "--workers-min",
            type=click.IntRange(least, 5000),
            default=least,
            show_default=True,
            help="Minimum workers of a fleet.",
        )(verb)
        return click.argument("runtimes", metavar="[RUNTIME]...", nargs=-1)(verb)

    return decorate


@click.group(
    invoke_without_command=True,
    short_help="Print deployment manifests for workers.",
    epilog="Example: penstock deploy kubernetes > workers.yaml",
)
@click.pass_context
def deploy(context: click.Context) -> None:
    """Print what starts the workers of each runtime, scaled by how many tasks want to run.

    Runtimes are those of the settings here, whose `image`, `command`, `queue` and `resources` say
    what their workers are. Runtimes of one queue share its workers. Nothing is asked or changed.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@deploy.command(
    short_help="Print manifests of Kubernetes.",
    epilog="Example: penstock deploy kubernetes process --workers-max 20 > workers.yaml",
)
@_workers(0)
@click.option(
    "--namespace", metavar="NAME", default="penstock", show_default=True, help="Where they run."
)
def kubernetes(
    *,
    runtimes: tuple[str, ...],
    workers_min: int,
    workers_max: int,
    namespace: str,
    **given: Any,
) -> None:
    """Print a Deployment and a ScaledObject for each queue, of all runtimes or of these.

    They run beside what deploy/kubernetes has, instead of its worker.yaml, and need KEDA,
    which scales them by what GET /v1/operators says of their queue. Workers read the ConfigMaps
    penstock-settings and penstock-file, which needs the same [runtimes] tables, and the Secret
    penstock.

    Exit code 2: the settings do not say what to start.
    """
    _, fleets = _fleets(runtimes, workers_min, workers_max, given)
    click.echo(kubernetes_manifests(fleets, namespace=namespace), nl=False)


@deploy.command(
    short_help="Print a CloudFormation template for ECS.",
    epilog="Example: penstock deploy ecs --store s3://my-lake/penstock > workers.json",
)
@_workers(1, "store", "wakeups", "dispatchers")
def ecs(*, runtimes: tuple[str, ...], workers_min: int, workers_max: int, **given: Any) -> None:
    """Print a task definition, a service and its scaling for each queue, as one template.

    Services run on Fargate and are scaled by the figure Desired of their queue, which dispatchers
    of the profile aws send to CloudWatch, which is the profile of workers here too. There is one
    worker at least: where none runs, nothing can be divided by it. Images have the settings file in
    /pipeline, with the [runtimes] tables.

    Exit code 2: the settings do not say what to start.
    """
    given["profile"] = InstallationProfile.AWS
    settings, fleets = _fleets(runtimes, workers_min, workers_max, given)
    shared = _shared(settings)
    if settings.stop_seconds > ECS_STOP_SECONDS_MAX:
        click.echo(
            f"penstock: Fargate waits 120 seconds at most, so stop_seconds is"
            f" {ECS_STOP_SECONDS_MAX:g} here and not {settings.stop_seconds:g}.",
            err=True,
        )
        fleets = [replace(each, stop_seconds=ECS_STOP_SECONDS_MAX) for each in fleets]
    click.echo(ecs_template(fleets, shared))


def _fleets(
    runtimes: Sequence[str], workers_min: int, workers_max: int, given: dict[str, Any]
) -> tuple[Settings, list[WorkerFleet]]:
    settings = settings_of(given)
    registry = wiring().make_registry(settings)
    return settings, fleets_of(
        settings,
        registry,
        runtimes=runtimes,
        workers_min=workers_min,
        workers_max=workers_max,
    )


def _shared(settings: Settings) -> Mapping[str, str]:
    if not settings.store.startswith("s3://"):
        raise InvalidInput(
            "store is a folder of this machine, which workers elsewhere do not reach.",
            hint="Set PENSTOCK_STORE to s3://BUCKET/PREFIX.",
        )
    if not settings.dispatchers:
        raise InvalidInput(
            "dispatchers is not set, so workers elsewhere do not find a dispatcher.",
            hint="Set PENSTOCK_DISPATCHERS to the URLs of internal listeners.",
        )
    default, every = variables_of(Settings()), variables_of(settings)
    shared: dict[str, str] = {}
    for name in _SHARED:
        variable = f"PENSTOCK_{name.upper()}"
        value = every.get(variable)
        if value is None or value == default.get(variable):
            continue
        if shown_value(name, value) != value or (name == "spark" and ";" in value):
            raise InvalidInput(
                f"{name} holds a secret, and nothing secret is printed.",
                hint=f"Unset {variable} here, and give it to the tasks as a secret of their own.",
            )
        shared[variable] = value
    if region := settings.aws_region or os.environ.get("AWS_REGION"):
        shared["AWS_REGION"] = region
    return shared


ECS_STOP_SECONDS_MAX: Final = 100.0
"""How long tasks may go on: Fargate kills a container 120 seconds after it has asked it to stop."""
_STOP_TIMEOUT: Final = 120
_GIB: Final = 1024
_SIZES: Final = (
    (256, (512, 1 * _GIB, 2 * _GIB)),
    (512, tuple(range(1 * _GIB, 4 * _GIB + 1, _GIB))),
    (1024, tuple(range(2 * _GIB, 8 * _GIB + 1, _GIB))),
    (2048, tuple(range(4 * _GIB, 16 * _GIB + 1, _GIB))),
    (4096, tuple(range(8 * _GIB, 30 * _GIB + 1, _GIB))),
    (8192, tuple(range(16 * _GIB, 60 * _GIB + 1, 4 * _GIB))),
    (16384, tuple(range(32 * _GIB, 120 * _GIB + 1, 8 * _GIB))),
)
"""The sizes of Fargate: units of CPU, of which 1,024 are one, and the MiB that go with them."""
_PARAMETERS: Final = {
    "Cluster": ("String", "The name of the cluster; it needs Container Insights."),
    "Subnets": ("List<AWS::EC2::Subnet::Id>", "Where workers run."),
    "SecurityGroups": ("List<AWS::EC2::SecurityGroup::Id>", "What dispatchers let in on 7071."),
    "ExecutionRole": ("String", "The ARN of the role that pulls the image and reads the secret."),
    "TaskRole": ("String", "The ARN of the role of workers: see docs/iam.md."),
    "WorkerSecret": ("String", "The ARN of the secret that is PENSTOCK_WORKER_SECRET."),
    "LogGroup": ("String", "The log group of CloudWatch that workers write to."),
}


def ecs_template(fleets: Sequence[WorkerFleet], variables: Mapping[str, str]) -> str:
    """All of it, as JSON. `variables` are what the processes of the installation share."""
    made: dict[str, Any] = {}
    for fleet in fleets:
        made.update(_ecs_resources(fleet, {**variables, **fleet.variables()}))
    whole = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Workers of Penstock, a service for each queue",
        "Parameters": {
            name: {"Type": kind, "Description": about}
            for name, (kind, about) in _PARAMETERS.items()
        },
        "Resources": made,
    }
    return json.dumps(whole, indent=2)


def _ecs_resources(fleet: WorkerFleet, variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    # Names of resources are letters and digits, in which two fleets may be alike.
    base = "".join(filter(str.isalnum, fleet.name))
    base += hashlib.sha256(fleet.queue.encode()).hexdigest()[:6]
    definition, service, scaling = f"{base}definition", f"{base}service", f"{base}scaling"
    running = {"Fn::GetAtt": [service, "Name"]}
    target = {
        "ServiceNamespace": "ecs",
        "ScalableDimension": "ecs:service:DesiredCount",
        "ResourceId": {"Fn::Join": ["/", ["service", {"Ref": "Cluster"}, running]]},
        "MinCapacity": fleet.workers_min,
        "MaxCapacity": fleet.workers_max,
    }
    policy = {
        "PolicyName": fleet.name,
        "PolicyType": "TargetTrackingScaling",
        "ScalingTargetId": {"Ref": scaling},
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": fleet.concurrency,
            "ScaleInCooldown": 300,
            "ScaleOutCooldown": 60,
            "CustomizedMetricSpecification": {"Metrics": _metrics(fleet, running)},
        },
    }
    yield definition, _resource("ECS::TaskDefinition", _definition(fleet, variables))
    yield service, _resource("ECS::Service", _service(definition))
    yield scaling, _resource("ApplicationAutoScaling::ScalableTarget", target)
    yield f"{base}policy", _resource("ApplicationAutoScaling::ScalingPolicy", policy)


def _service(definition: str) -> Mapping[str, Any]:
    network = {"Subnets": {"Ref": "Subnets"}, "SecurityGroups": {"Ref": "SecurityGroups"}}
    return {
        # Without a count: how many there are is the autoscaler's.
        "Cluster": {"Ref": "Cluster"},
        "LaunchType": "FARGATE",
        "TaskDefinition": {"Ref": definition},
        "NetworkConfiguration": {"AwsvpcConfiguration": network},
    }


def _definition(fleet: WorkerFleet, variables: Mapping[str, str]) -> Mapping[str, Any]:
    cpu, memory = _size(fleet)
    logs = {
        "awslogs-group": {"Ref": "LogGroup"},
        "awslogs-region": {"Ref": "AWS::Region"},
        "awslogs-stream-prefix": fleet.name,
    }
    return {
        "Family": f"penstock-{fleet.name}",
        "RequiresCompatibilities": ["FARGATE"],
        "NetworkMode": "awsvpc",
        "Cpu": str(cpu),
        "Memory": str(memory),
        "ExecutionRoleArn": {"Ref": "ExecutionRole"},
        "TaskRoleArn": {"Ref": "TaskRole"},
        "EphemeralStorage": {"SizeInGiB": 40},
        "ContainerDefinitions": [
            {
                "Name": "worker",
                "Image": fleet.image,
                "Command": list(fleet.command),
                "Essential": True,
                "StopTimeout": _STOP_TIMEOUT,
                "Environment": [
                    {"Name": name, "Value": value} for name, value in sorted(variables.items())
                ],
                "Secrets": [
                    {"Name": "PENSTOCK_WORKER_SECRET", "ValueFrom": {"Ref": "WorkerSecret"}}
                ],
                "LogConfiguration": {"LogDriver": "awslogs", "Options": logs},
            }
        ],
    }


def _metrics(fleet: WorkerFleet, service: object) -> list[Mapping[str, Any]]:
    def stat(name: str, namespace: str, **dimensions: object) -> Mapping[str, Any]:
        told = [{"Name": key, "Value": value} for key, value in dimensions.items()]
        metric = {"MetricName": name, "Namespace": namespace, "Dimensions": told}
        return {"Metric": metric, "Stat": "Average"}

    running = stat(
        "RunningTaskCount",
        "ECS/ContainerInsights",
        ClusterName={"Ref": "Cluster"},
        ServiceName=service,
    )
    return [
        {
            "Id": "wanted",
            "MetricStat": stat(DESIRED, NAMESPACE, Queue=fleet.queue),
            "ReturnData": False,
        },
        {"Id": "running", "MetricStat": running, "ReturnData": False},
        {"Id": "each", "Expression": "wanted / running", "ReturnData": True},
    ]


def _resource(kind: str, properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"Type": f"AWS::{kind}", "Properties": properties}


def _size(fleet: WorkerFleet) -> tuple[int, int]:
    """The smallest that Fargate has and that is enough."""
    mib = math.ceil(fleet.memory_bytes / 1024**2)
    for cpu, memories in _SIZES:
        enough = [each for each in memories if each >= mib]
        if cpu >= fleet.cpu * 1024 and enough:
            return cpu, enough[0]
    raise InvalidInput(
        f"Workers of the queue {fleet.queue} need {fleet.cpu:g} CPUs and {mib / _GIB:,.1f} GiB; a"
        " task of Fargate has 16 and 120 at most.",
        hint="Let fewer tasks run at a time, with --concurrency.",
    )


_USER: Final = 10001
_GRACE_SECONDS: Final = 30
"""How much longer a pod has than its tasks: to give back what did not end, and to say so."""
_ASKED: Final = "http://penstock.{namespace}.svc:7070/v1/operators"
"""By the whole name of the service: KEDA is in another namespace."""
_AUTHENTICATION: Final = "penstock-scaling"
_ACCOUNT: Final = "penstock-worker"


def kubernetes_manifests(fleets: Sequence[WorkerFleet], *, namespace: str) -> str:
    """All of it, as YAML."""
    if not LABEL.fullmatch(namespace):
        raise InvalidInput(
            f"{namespace[:100]!r} is no name of a namespace.",
            hint="Write a-z, 0-9 and - in between, 63 characters at most.",
        )
    url = _ASKED.format(namespace=namespace)
    every = [
        *_kubernetes_shared(),
        *(each for fleet in fleets for each in _kubernetes_resources(fleet, url)),
    ]
    for each in every:
        each["metadata"]["namespace"] = namespace
    return yaml.safe_dump_all(every, sort_keys=False, explicit_start=True, allow_unicode=False)


def _kubernetes_shared() -> Iterator[Mapping[str, Any]]:
    yield {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": _ACCOUNT},
        "automountServiceAccountToken": False,
    }
    yield {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "TriggerAuthentication",
        "metadata": {"name": _AUTHENTICATION},
        # Looking is all that it needs.
        "spec": {
            "secretTargetRef": [{"parameter": "token", "name": "penstock", "key": "viewer-token"}]
        },
    }


def _kubernetes_resources(fleet: WorkerFleet, url: str) -> Iterator[Mapping[str, Any]]:
    labels = {
        "app.kubernetes.io/name": "penstock",
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/instance": fleet.name,
    }
    yield {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": fleet.name, "labels": dict(labels)},
        # Without replicas: how many there are is the autoscaler's.
        "spec": {
            "selector": {"matchLabels": dict(labels)},
            "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(fleet)},
        },
    }
    yield {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": fleet.name},
        "spec": {
            "scaleTargetRef": {"name": fleet.name},
            "minReplicaCount": fleet.workers_min,
            "maxReplicaCount": fleet.workers_max,
            "cooldownPeriod": 300,
            "triggers": [
                {
                    "type": "metrics-api",
                    "metadata": {
                        "url": url,
                        "valueLocation": f"queues.{fleet.queue}",
                        "targetValue": str(fleet.concurrency),
                        "authMode": "bearer",
                    },
                    "authenticationRef": {"name": _AUTHENTICATION},
                }
            ],
        },
    }


def _pod(fleet: WorkerFleet) -> Mapping[str, Any]:
    return {
        "serviceAccountName": _ACCOUNT,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(fleet.stop_seconds) + _GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(fleet)],
        "volumes": [
            {"name": "data", "emptyDir": {"sizeLimit": "20Gi"}},
            {"name": "temporary", "emptyDir": {"sizeLimit": "10Gi"}},
            {"name": "file", "configMap": {"name": "penstock-file"}},
        ],
    }


def _container(fleet: WorkerFleet) -> Mapping[str, Any]:
    """A worker listens nowhere, so it has no probe."""
    memory = f"{math.ceil(fleet.memory_bytes / 1024**2)}Mi"
    said = [{"name": name, "value": _plain(value)} for name, value in fleet.variables().items()]
    secret = {"secretKeyRef": {"name": "penstock", "key": "worker-secret"}}
    return {
        "name": "worker",
        "image": fleet.image,
        "args": [_plain(each) for each in fleet.command],
        "envFrom": [{"configMapRef": {"name": "penstock-settings"}}],
        "env": [*said, {"name": "PENSTOCK_WORKER_SECRET", "valueFrom": secret}],
        "resources": {
            "requests": {"cpu": f"{math.ceil(fleet.cpu * 1000)}m", "memory": memory},
            "limits": {"memory": memory},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "data", "mountPath": "/var/lib/penstock"},
            {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod
            {"name": "file", "mountPath": "/etc/penstock", "readOnly": True},
        ],
    }


def _plain(text: str) -> str:
    """A text of which Kubernetes expands nothing: $(NAME) would be a variable's value."""
    return text.replace("$", "$$")
