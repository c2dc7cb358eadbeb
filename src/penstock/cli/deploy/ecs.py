"""Fleets as one template of CloudFormation: services of ECS on Fargate. Pure.

Of each fleet a task definition, a service, and its scaling: target tracking keeps the figure
`Desired` that dispatchers of the profile `aws` send to CloudWatch for the queue, divided by the
tasks of the service that run, at what a worker runs at a time. Accounts, networks, roles and
secrets are parameters of the template, and no value of a secret is in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.cli.deploy.fleets import Fleet
from penstock.dispatcher.cloudwatch import DESIRED, NAMESPACE
from penstock.kernel.errors import InvalidInput

STOP_SECONDS_MAX: Final = 100.0
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


def template(fleets: Sequence[Fleet], variables: Mapping[str, str]) -> str:
    """All of it, as JSON. `variables` are what the processes of the installation share."""
    made: dict[str, Any] = {}
    for fleet in fleets:
        made.update(_of(fleet, {**variables, **fleet.variables()}))
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


def _of(fleet: Fleet, variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
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


def _definition(fleet: Fleet, variables: Mapping[str, str]) -> Mapping[str, Any]:
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


def _metrics(fleet: Fleet, service: object) -> list[Mapping[str, Any]]:
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


def _size(fleet: Fleet) -> tuple[int, int]:
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
