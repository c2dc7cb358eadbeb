"""Fleets as manifests of Kubernetes, for the namespace that deploy/kubernetes makes. Pure.

Workers read the ConfigMaps `penstock-settings` and `penstock-file` and the Secret `penstock`. They
are scaled by KEDA, which asks the dispatcher itself how many tasks of the queue should run
(`queues` of `GET /v1/operators`) and divides by what a worker runs at a time. A plain
HorizontalPodAutoscaler cannot ask for that without a server of metrics in between, and never goes
to zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from penstock.cli.deploy.fleets import LABEL, Fleet
from penstock.kernel.errors import InvalidInput

_USER: Final = 10001
_GRACE_SECONDS: Final = 30
"""How much longer a pod has than its tasks: to give back what did not end, and to say so."""
_ASKED: Final = "http://penstock.{namespace}.svc:7070/v1/operators"
"""By the whole name of the service: KEDA is in another namespace."""
_AUTHENTICATION: Final = "penstock-scaling"
_ACCOUNT: Final = "penstock-worker"


def manifests(fleets: Sequence[Fleet], *, namespace: str) -> str:
    """All of it, as YAML."""
    if not LABEL.fullmatch(namespace):
        raise InvalidInput(
            f"{namespace[:100]!r} is no name of a namespace.",
            hint="Write a-z, 0-9 and - in between, 63 characters at most.",
        )
    url = _ASKED.format(namespace=namespace)
    every = [*_shared(), *(each for fleet in fleets for each in _of(fleet, url))]
    for each in every:
        each["metadata"]["namespace"] = namespace
    return yaml.safe_dump_all(every, sort_keys=False, explicit_start=True, allow_unicode=False)


def _shared() -> Iterator[Mapping[str, Any]]:
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


def _of(fleet: Fleet, url: str) -> Iterator[Mapping[str, Any]]:
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


def _pod(fleet: Fleet) -> Mapping[str, Any]:
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


def _container(fleet: Fleet) -> Mapping[str, Any]:
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
