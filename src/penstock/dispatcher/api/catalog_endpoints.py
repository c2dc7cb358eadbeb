"""The Iceberg REST catalog over what is published, for readers alone.

An application of its own below `/iceberg` on the public listener, with its own places for requests:
readers, however many, take none of those that people and programs need. It has one namespace,
`penstock`, and a table for each dataset that can be one (`dispatcher.catalog.tables`). Whatever
would write is refused. Errors have the protocol's form and types.

A caller shows the token of the API, that of viewers, or a token for reading, which may be for some
datasets only: of others it is told nothing but that it may not read them. Planning is reading.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote

import msgspec

from penstock.datasets.iceberg.metadata import metadata_json
from penstock.dispatcher.api.application import Application, Routes
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import (
    ApiCall,
    ApiEndpoint,
    Handler,
    HttpReply,
    RequiredProof,
)
from penstock.dispatcher.api.requests import RequestLimits
from penstock.dispatcher.catalog.metadata_writer import metadata_location
from penstock.dispatcher.catalog.scan_planner import ScanAsk, ScanPage, decoded
from penstock.dispatcher.catalog.tables import CatalogTable
from penstock.kernel.clock import Clock
from penstock.kernel.errors import Damaged, InvalidInput, StoreError
from penstock.protocol.base import Answer, Ask
from penstock.protocol.datasets import (
    NAMES_MAX,
    PAGE_MAX,
    CancelParams,
    ConfigParams,
    NamespaceParams,
    NamespacesParams,
    PlanAsk,
    ReportAsk,
    TableParams,
    TablesParams,
    TasksAsk,
)
from penstock.protocol.problem import Problem

PREFIX: Final = "/iceberg/"
NAMESPACE: Final = "penstock"
_LIMITS: Final = RequestLimits(requests_max=32, anonymous_requests_max=4, request_seconds_max=60.0)
_SPACES: Final = "/v1/namespaces"
_TABLES: Final = f"{_SPACES}/{{namespace}}/tables"
_TABLE: Final = f"{_TABLES}/{{table}}"
_READ_ONLY: Final = "This catalog is read-only: only jobs write the tables."
_NO_OAUTH: Final = "This catalog issues no tokens by OAuth."
_NO_OAUTH_HINT: Final = "Configure `token`, not `credential`: `penstock token create` makes one."
_NO_TASK: Final = "NoSuchPlanTaskException"
_TYPES: Final = {
    401: "NotAuthorizedException",
    403: "ForbiddenException",
    404: "NoSuchEndpointException",
    406: "UnsupportedOperationException",
    503: "ServiceUnavailableException",
}
"""The protocol's types of errors, where a problem has no more exact one."""
_encode = msgspec.json.Encoder().encode


async def config(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """What clients are to know first: what there is, and that the server plans scans."""
    del parts, call
    return _reply(
        {
            "defaults": {"scan-planning-mode": "server"},
            "overrides": {},
            "endpoints": [
                f"{each.method} {each.path}".replace("/v1/", "/v1/{prefix}/").replace(
                    "{plan}", "{plan-id}"
                )
                for each in ENDPOINTS
                if each.path != "/v1/config"
            ],
        }
    )


async def namespaces(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """The one namespace, which has none below it."""
    del parts
    params: NamespacesParams = call.params
    if params.parent and params.parent != NAMESPACE:
        return _no_namespace(params.parent)
    return _reply({"namespaces": [] if params.parent else [[NAMESPACE]]})


async def namespace(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """What is to be known of the namespace."""
    del parts
    params: NamespaceParams = call.params
    if params.namespace != NAMESPACE:
        return _no_namespace(params.namespace)
    return _reply({"namespace": [NAMESPACE], "properties": {}})


async def has_namespace(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Whether there is the namespace."""
    found = await namespace(parts, call)
    return found if isinstance(found, Problem) else HttpReply(b"", status=204)


async def tables(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """The names of tables: page by page, or all, if no page is asked for."""
    params: TablesParams = call.params
    if params.namespace != NAMESPACE:
        return _no_namespace(params.namespace)
    limit = NAMES_MAX if params.page_token is None else min(params.page_size, PAGE_MAX)
    after = params.page_token or ""
    found = await parts.tables.names(after=after, only=call.tables, limit=limit)
    named = [{"namespace": [NAMESPACE], "name": each} for each in found]
    following = found[-1] if len(found) == limit else None
    return _reply({"identifiers": named, "next-page-token": following})


async def has_table(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Whether there is a table."""
    found = await _table(parts, call)
    if isinstance(found, Problem):
        return found
    return _unfit(found) or HttpReply(b"", status=204)


async def table(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """A table as it is now."""
    params: TableParams = call.params
    found = await _table(parts, call)
    if isinstance(found, Problem):
        return found
    if parts.writer is None:
        title = "This dispatcher has no store, and writes no files of tables."
        return Problem(type=_TYPES[503], title=title, status=503)
    if found.unwritten():
        written = await parts.writer.written(found.name)
        if isinstance(written, str):
            return _no_table(written)
        found = written
    shown = found.shown
    if shown is None or shown.manifest_list is None:
        title = f"The files of the table {found.name!r} are not written yet."
        again = Problem(type=_TYPES[503], title=title, status=503, detail="Retry soon.")
        return _unfit(found) or again
    vended = await _vended(parts, call, found)
    told = found.metadata(shown, is_all=params.snapshots != "refs")
    age_seconds = max(0.0, found.loaded_at - shown.made_at.timestamp())
    body = {
        "metadata-location": metadata_location(shown.manifest_list),
        "metadata": metadata_json(told),
        "config": {
            "penstock.snapshot-age-seconds": f"{age_seconds:.0f}",
            # DuckDB asks for one, whatever the files lie in.
            "client.region": "us-east-1",
            **{name: value for each in vended for name, value in each["config"].items()},
        },
        "storage-credentials": vended,
    }
    return _reply(body)


async def plan(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """The files of a scan."""
    ask: PlanAsk = call.ask
    if ask.start_snapshot_id is not None or ask.end_snapshot_id is not None:
        title = "Incremental scans between two snapshots are not supported."
        return Problem(type=_TYPES[406], title=title, status=406)
    found = await _table(parts, call, snapshot=ask.snapshot_id)
    if isinstance(found, Problem):
        return found
    made = found.snapshot(ask.snapshot_id)
    schema = made.schema_id if ask.use_snapshot_schema else found.main.schema_id
    scan = ScanAsk(
        snapshot=made.id,
        schema=schema,
        table=found.uuid,
        filter=ask.filter,
        is_case_sensitive=ask.case_sensitive,
    )
    page = await _planned(parts, found, scan)
    if isinstance(page, Problem):
        return page
    vended = await _vended(parts, call, found)
    said = {"status": "completed", "plan-id": str(made.id), **_tasks(page)}
    return _reply({**said, "storage-credentials": vended} if vended else said)


async def tasks(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """More of the files of a scan."""
    ask: TasksAsk = call.ask
    try:
        scan = decoded(ask.plan_task)
    except InvalidInput as error:
        return Problem(type=_NO_TASK, title=error.message, status=404)
    found = await _table(parts, call, is_new=False, snapshot=scan.snapshot)
    if isinstance(found, Problem):
        return found
    if scan.table not in ("", found.uuid):
        return Problem(type=_NO_TASK, title="The plan task is of another table.", status=404)
    if all(each.id != scan.snapshot for each in found.snapshots):
        title = f"The snapshot {scan.snapshot} of this plan task is no longer kept."
        return Problem(type=_NO_TASK, title=title, status=404)
    page = await _planned(parts, found, scan)
    return page if isinstance(page, Problem) else _reply(_tasks(page))


async def cancel(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Nothing is held for a plan, so nothing is to be given up."""
    found = await _table(parts, call, is_new=False)
    return found if isinstance(found, Problem) else HttpReply(b"", status=204)


async def report(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Measurements of clients are taken, and not kept."""
    found = await _table(parts, call, is_new=False)
    return found if isinstance(found, Problem) else HttpReply(b"", status=204)


async def credentials(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Credentials for the files of a table, again."""
    found = await _table(parts, call, is_new=False)
    if isinstance(found, Problem):
        return found
    return _reply({"storage-credentials": await _vended(parts, call, found)})


async def _vended(parts: ApiContext, call: ApiCall, found: CatalogTable) -> list[dict[str, Any]]:
    """Credentials for reading what lies below a dataset; none where none are minted."""
    if not parts.minter.mints:
        return []
    who = f"reader-{hashlib.sha256(call.reader.encode()).hexdigest()[:12]}"
    minted = await parts.minter.mint_reading(f"{found.location}/", who=who)
    parts.audit.note(
        what=call.what,
        outcome="allowed",
        task_id=None,
        attempt=None,
        caller=call.reader,
        address=call.address,
        reason="",
        detail={"read": list(minted.read), "expires_at": minted.expires_at.isoformat()},
    )
    expires_ms = int(minted.expires_at.timestamp() * 1000)
    said = {
        "s3.access-key-id": minted.access_key,
        "s3.secret-access-key": minted.secret_key,
        "s3.session-token": minted.session_token,
        "s3.session-token-expires-at-ms": str(expires_ms),
        "client.region": minted.region,
        "s3.region": minted.region,
    }
    if minted.endpoint:
        said |= {"s3.endpoint": minted.endpoint, "s3.path-style-access": "true"}
    refreshed = f"v1/namespaces/{NAMESPACE}/tables/{quote(found.name, safe='')}/credentials"
    said |= {"client.refresh-credentials-endpoint": refreshed}
    return [{"prefix": f"{found.location}/", "config": said}]


async def _table(
    parts: ApiContext, call: ApiCall, *, is_new: bool = True, snapshot: int | None = None
) -> CatalogTable | Problem:
    params: TableParams = call.params
    if params.namespace != NAMESPACE:
        return _no_namespace(params.namespace)
    if call.tables is not None and params.table not in call.tables:
        title = f"This token does not grant reading the table {params.table!r}."
        return Problem(type=_TYPES[403], title=title, status=403)
    found = await parts.tables.load(params.table, is_new=is_new, snapshot=snapshot)
    return _no_table(found) if isinstance(found, str) else found


async def _planned(parts: ApiContext, found: CatalogTable, scan: ScanAsk) -> ScanPage | Problem:
    if parts.planner is None:
        title = "This dispatcher has no store, and plans no scans."
        return Problem(type=_TYPES[503], title=title, status=503)
    try:
        return await parts.planner.plan(found, scan)
    except Damaged as error:
        detail = error.hint
        return Problem(type="InternalServerError", title=error.message, status=500, detail=detail)
    except StoreError as error:
        return Problem(type=_TYPES[503], title=error.message, status=503, detail=error.hint)


def _tasks(page: ScanPage) -> dict[str, Any]:
    return {
        "delete-files": [],
        "file-scan-tasks": page.tasks,
        "plan-tasks": [] if page.next is None else [page.next],
    }


def _reply(body: Any) -> HttpReply:
    return HttpReply(_encode(body))


def _unfit(found: CatalogTable) -> Problem | None:
    """Why no client can read what is published, if none could before."""
    why = found.main.unfit
    if why is None or found.shown is not None:
        return None
    return _no_table(why)


def _no_table(why: str) -> Problem:
    return Problem(type="NoSuchTableException", title=why, status=404)


def _no_namespace(name: str) -> Problem:
    title = f"There is no namespace {name!r}; the only one is {NAMESPACE!r}."
    return Problem(type="NoSuchNamespaceException", title=title, status=404)


def _endpoint(
    method: str,
    path: str,
    summary: str,
    handler: Handler,
    *asks: type[Ask],
) -> ApiEndpoint:
    """`asks` are what the path and the query say, and the body if there is one."""
    params, ask = (*asks, None)[:2]
    return ApiEndpoint(
        method,
        path,
        summary,
        handler,
        params=params,
        ask=ask,
        answer=None,
        proof=RequiredProof.READING,
        may_omit_body=True,
    )


ENDPOINTS: Final = (
    _endpoint("GET", "/v1/config", "Get the configuration of the catalog", config, ConfigParams),
    _endpoint("GET", _SPACES, "List namespaces", namespaces, NamespacesParams),
    _endpoint("GET", f"{_SPACES}/{{namespace}}", "Get a namespace", namespace, NamespaceParams),
    _endpoint(
        "HEAD", f"{_SPACES}/{{namespace}}", "Check a namespace", has_namespace, NamespaceParams
    ),
    _endpoint("GET", _TABLES, "List tables", tables, TablesParams),
    _endpoint("GET", _TABLE, "Load a table", table, TableParams),
    _endpoint("HEAD", _TABLE, "Check a table", has_table, TableParams),
    _endpoint(
        "GET", f"{_TABLE}/credentials", "Get credentials for its files", credentials, TableParams
    ),
    _endpoint("POST", f"{_TABLE}/plan", "Plan a scan", plan, TableParams, PlanAsk),
    _endpoint("DELETE", f"{_TABLE}/plan/{{plan}}", "Cancel a plan", cancel, CancelParams),
    _endpoint(
        "POST", f"{_TABLE}/tasks", "Get the files of a plan task", tasks, TableParams, TasksAsk
    ),
    _endpoint("POST", f"{_TABLE}/metrics", "Report metrics", report, TableParams, ReportAsk),
)


class CatalogApplication(Application):
    """What answers below `/iceberg`."""

    def __init__(self, parts: ApiContext, *, clock: Clock | None = None) -> None:
        endpoints = [replace(each, path=f"{PREFIX[:-1]}{each.path}") for each in ENDPOINTS]
        super().__init__(
            "catalog",
            endpoints,
            parts,
            counters=parts.metrics.counters,
            limits=_LIMITS,
            clock=clock,
        )

    def not_routed(self, routes: Routes, method: str, path: str) -> Problem:
        del routes
        if path == f"{PREFIX}v1/oauth/tokens":
            return Problem(type=_TYPES[406], title=_NO_OAUTH, detail=_NO_OAUTH_HINT, status=406)
        if method in ("GET", "HEAD", "OPTIONS"):
            return Problem(type=_TYPES[404], title="No such path.", status=404)
        return Problem(type=_TYPES[406], title=_READ_ONLY, status=406)

    def refusal(self, problem: Problem) -> Problem | HttpReply:
        status = 400 if problem.status == 422 else problem.status
        kind = problem.type
        if not kind.endswith(("Exception", "ServerError")):
            kind = _TYPES.get(status) or (
                "BadRequestException" if status < 500 else "InternalServerError"
            )
        message = f"{problem.title} {problem.detail}".strip()
        error = {"message": message, "type": kind, "code": status}
        more = {401: (b"www-authenticate", b"Bearer"), 503: (b"retry-after", b"1")}.get(status)
        headers = () if more is None else (more,)
        return HttpReply(_encode({"error": error}), status=status, headers=headers)
