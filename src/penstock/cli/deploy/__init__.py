"""`penstock deploy`: print what starts the workers of each runtime, and scales them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import click

from penstock.cli.deploy import ecs as on_ecs
from penstock.cli.deploy import kubernetes as on_kubernetes
from penstock.cli.deploy.fleets import Fleet, fleets_of
from penstock.cli.installation import Verb, set_by, settings_of, wiring
from penstock.cli.settings import shown_value
from penstock.kernel.errors import InvalidInput
from penstock.settings import Profile, Settings, variables_of

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
            help="How many workers a fleet has at most.",
        )(verb)
        verb = click.option(
            "--workers-min",
            type=click.IntRange(least, 5000),
            default=least,
            show_default=True,
            help="How many workers a fleet has at least.",
        )(verb)
        return click.argument("runtimes", metavar="[RUNTIME]...", nargs=-1)(verb)

    return decorate


@click.group(
    invoke_without_command=True,
    short_help="Print the workers of each runtime.",
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
    click.echo(on_kubernetes.manifests(fleets, namespace=namespace), nl=False)


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
    given["profile"] = Profile.AWS
    settings, fleets = _fleets(runtimes, workers_min, workers_max, given)
    shared = _shared(settings)
    if settings.stop_seconds > on_ecs.STOP_SECONDS_MAX:
        click.echo(
            f"penstock: Fargate waits 120 seconds at most, so stop_seconds is"
            f" {on_ecs.STOP_SECONDS_MAX:g} here and not {settings.stop_seconds:g}.",
            err=True,
        )
        fleets = [replace(each, stop_seconds=on_ecs.STOP_SECONDS_MAX) for each in fleets]
    click.echo(on_ecs.template(fleets, shared))


def _fleets(
    runtimes: Sequence[str], workers_min: int, workers_max: int, given: dict[str, Any]
) -> tuple[Settings, list[Fleet]]:
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
