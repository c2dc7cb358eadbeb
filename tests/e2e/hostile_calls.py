"""What a hostile task asks of the dispatcher: with no proof, with a wrong one, about others' tasks.

Run inside a task, as `tests.e2e.hostile_operator` is, and so with nothing of Penstock's but what
everybody can read: plain requests, and tokens that it forges by itself.
"""

from __future__ import annotations

import base64
import hmac
import json
import urllib.error
import urllib.request
from typing import Any, Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils

Said = dict[str, list[Any]]
"""By the name of a try: a status and a word, or the name of an error; or "done", if it was."""

TASK_HEADER: Final = "X-Trace-Task-Capability"
GUESSED: Final = "a-lease-token-that-was-guessed"
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, method: str, path: str, body: object = None, **headers: str) -> list[Any]:
    """The status of an answer, and the kind of problem that it is; "done" if it is none."""
    data = None if body is None else json.dumps(body).encode()
    said = {"Content-Type": "application/json"}
    said |= {name.replace("_", "-"): value for name, value in headers.items() if value}
    request = urllib.request.Request(f"{url}{path}", data, said, method=method)
    try:
        with _OPENER.open(request, timeout=20) as answer:
            return ["done", answer.status, answer.read().decode("utf-8", "replace")]
    except urllib.error.HTTPError as error:
        with error:
            found = error.read()
        try:
            return [error.code, json.loads(found)["type"]]
        except ValueError:
            return [error.code, "page"]


class Api:
    """The calls of one attempt, as anybody might make them."""

    def __init__(self, targets: Any, token: str) -> None:
        self.targets = targets
        self.url: str = targets["internal"]
        self.claims = part_of(token, 1)
        self.own = {"task_id": self.claims["task_id"], "attempt": self.claims["attempt"]}

    def credentials(self, token: str, **body: list[str]) -> list[Any]:
        return ask(self.url, "POST", "/v1/task/credentials", body, **capability(token))

    def query(self, token: str, sql: str = "SELECT * FROM precious") -> list[Any]:
        return ask(self.url, "POST", "/v1/task/query", {"sql": sql}, **capability(token))

    def query_directly(self, token: str) -> list[Any]:
        """At the query service, past the dispatcher."""
        body = {"sql": "SELECT 1"}
        return ask(self.targets["queries"], "POST", "/v1/task/query", body, **capability(token))

    def begin(self, token: str) -> list[Any]:
        """As the query service asks what may be read."""
        body = {"sql": "SELECT 1", "tables": ["precious"]}
        return ask(self.url, "POST", "/internal/query/begin", body, **capability(token))

    def events(self, token: str, lease: str = GUESSED, **held: Any) -> list[Any]:
        event = {"event_id": "hostile", "dataset": "precious", "partition_key": "open"}
        said = {**self.own, "lease_token": lease, "events": [event], **held}
        answer = ask(self.url, "POST", "/v1/task/events", said, **capability(token))
        if answer[0] == "done" and '"outcome":"refused"' in answer[2]:
            # Each event has an answer of its own.
            return [answer[1], "refused"]
        return answer

    def heartbeat(self, token: str, lease: str = GUESSED, **held: Any) -> list[Any]:
        one = {**self.own, "lease_token": lease, "token": token, **held}
        return ask(self.url, "POST", "/v1/task/heartbeat", {"tasks": [one]})

    def renewed(self, token: str, lease: str) -> str:
        """The next token, as a heartbeat with the right lease brings it."""
        answer = self.heartbeat(token, lease)
        return json.loads(answer[2])["results"][0]["token"] if answer[0] == "done" else ""

    def complete(self, token: str, lease: str = GUESSED, **held: Any) -> list[Any]:
        one = {**self.own, "lease_token": lease, "token": token, **held}
        return ask(self.url, "POST", "/v1/task/complete", {"tasks": [one]})

    def publish(self, token: str, dataset: str = "grumbles", **body: Any) -> list[Any]:
        """Rows into a buffer; `body` instead of them."""
        said = {"dataset": dataset, "batch": "hostile", **(body or {"rows": [{"id": "h"}]})}
        return ask(self.url, "POST", "/v1/task/buffer-publish", said, **capability(token))

    def output(self, location: str) -> list[dict[str, str]]:
        """An output of its own, wherever that was reported as."""
        (grant,) = self.claims["grants"]["write"]
        return [{"dataset": grant["dataset"], "location": location, "partition_key": "open"}]


def capability(token: str) -> dict[str, str]:
    return {TASK_HEADER.replace("-", "_"): token}


def api_tries(targets: Any, token: str) -> Said:
    """Every way to the dispatcher."""
    api = Api(targets, token)
    said: Said = {}
    for name, forged in {"no token": "", **forgeries(api, token)}.items():
        said[f"credentials, {name}"] = api.credentials(forged)
        said[f"events, {name}"] = api.events(forged)
        said[f"heartbeat, {name}"] = api.heartbeat(forged)
        said[f"complete, {name}"] = api.complete(forged)
        said[f"query, {name}"] = api.query(forged)
        said[f"publish, {name}"] = api.publish(forged)
    said["query begun, of the victim's dataset"] = api.begin(token)
    for name, sql in hostile_sql(targets).items():
        said[f"query, {name}"] = api.query(token, sql)
    wider = [f"{targets['root']}/"]
    said["credentials, to read everything"] = api.credentials(token, read=wider)
    said["credentials, to write everything"] = api.credentials(token, write=wider)
    theirs = [f"{targets['victim']['location']}/"]
    said["credentials, to write the victim's"] = api.credentials(token, write=theirs)
    up = [f"{targets['root']}/scratch/../datasets/"]
    said["credentials, by a way up"] = api.credentials(token, read=up)
    said |= buffer_tries(api, token)
    return {**said, **fence_tries(api, token), **listener_tries(targets, token)}


def buffer_tries(api: Api, token: str) -> Said:
    """What it should not publish, by its own token, which allows it to publish grumbles."""
    (grant,) = api.claims["grants"]["write"]
    places = {
        "the victim's file": f"{api.targets['victim']['location']}/data.txt",
        "the victim's running file": f"{api.targets['victim']['running']}/data.txt",
        "a file by a way up": f"{grant['prefix']}../../precious/data.txt",
        "a file of the machine": f"file://{api.targets['files']['the signing key']}",
    }
    said: Said = {}
    for name, location in places.items():
        file = {"location": location, "format": "jsonl", "bytes": 13, "sha256": "0" * 64}
        said[f"publish {name}"] = api.publish(token, file=file)
    for dataset in ("confided", "precious", "grumbles_rejected", "nothing"):
        said[f"publish into {dataset}"] = api.publish(token, dataset)
    said["publish too much"] = api.publish(token, rows=[{"id": "h" * 300_000}])
    said["publish far too much"] = api.publish(token, rows=[{"id": "h" * 2_000_000}])
    return said


def hostile_sql(targets: Any) -> dict[str, str]:
    """What the query service should not do for it, by its own token, which is right."""
    theirs = f"{targets['victim']['location']}/data.txt"
    return {
        "of the victim's dataset": "SELECT * FROM precious",
        "of the victim's dataset, by WITH": "WITH x AS (FROM precious) SELECT * FROM x",
        "of the victim's file": f"SELECT * FROM read_parquet('{theirs}')",
        "of the victim's file, by its name": f"SELECT * FROM '{theirs}'",
        "of a file": f"SELECT * FROM read_text('{targets['files']['the signing key']}')",
        "to attach": f"ATTACH '{targets['code']}/planted.db'",
        "to install": "INSTALL httpfs",
        "to load": "LOAD httpfs",
        "to set": "SET enable_external_access = true",
        "to copy": f"COPY (SELECT 1) TO '{targets['code']}/planted.csv'",
        "for all memory": "SELECT string_agg(repeat('x', 1000000) || i, '') FROM range(3000) t(i)",
    }


def fence_tries(api: Api, token: str) -> Said:
    """Another task's fence, and its own without the lease."""
    victim = api.targets["victim"]
    theirs = {"task_id": victim["task_id"], "attempt": victim["attempt"]}
    said: Said = {}
    for name, lease in {"guessed": GUESSED, "leaked": victim["lease_token"]}.items():
        said[f"events of the victim, {name}"] = api.events(token, lease, **theirs)
        said[f"heartbeat of the victim, {name}"] = api.heartbeat(token, lease, **theirs)
        said[f"complete the victim, {name}"] = api.complete(token, lease, **theirs)
        lost = {**theirs, "failure": {"reason": "hostile", "is_retried": False}}
        said[f"fail the victim, {name}"] = api.complete(token, lease, **lost)
    (grant,) = api.claims["grants"]["write"]
    up = f"{grant['prefix']}../../precious"
    said["events of its own, guessed"] = api.events(token)
    said["heartbeat of its own, guessed"] = api.heartbeat(token)
    said["heartbeat of its next attempt"] = api.heartbeat(token, attempt=api.own["attempt"] + 1)
    said["complete its own, guessed"] = api.complete(token)
    stolen = api.output(victim["location"])
    said["complete with the victim's"] = api.complete(token, outputs=stolen)
    said["complete by a way up"] = api.complete(token, outputs=api.output(up))
    foreign = [{**stolen[0], "dataset": victim["dataset"]}]
    said["complete the victim's dataset"] = api.complete(token, outputs=foreign)
    return said


def listener_tries(targets: Any, token: str) -> Said:
    """What is for workers, for sources and for people."""
    news = {"events": [{"event_id": "h", "dataset": "orders", "partition_key": "open"}]}
    internal: list[tuple[str, str, object]] = [
        ("POST", "/internal/hello", {"runtimes": ["process"]}),
        ("POST", "/internal/task-claim", {"operator": "victim:run"}),
        ("POST", "/internal/events", news),
        ("GET", "/internal/sources", None),
    ]
    public: list[tuple[str, str, object]] = [
        ("GET", "/v1/tasks", None),
        ("GET", "/v1/keys", None),
        ("GET", "/v1/audit", None),
        ("GET", "/metrics", None),
        ("POST", "/v1/keys/rotate", {}),
        ("POST", "/v1/trigger", {"job": "orders", "partition_key": "open"}),
        ("POST", "/v1/tasks/cancel", {"ids": [targets["victim"]["task_id"]]}),
        ("POST", "/v1/dag", {"source": "jobs: {}"}),
        ("POST", "/v1/query", {"sql": "SELECT * FROM precious"}),
    ]
    bearer = {"Authorization": f"Bearer {token}"}
    named = {**bearer, "X_Penstock_Worker": "worker-0"}
    said: Said = {}
    for each in internal:
        url, name = targets["internal"], f"{each[0]} {each[1]}"
        said[f"{name}, as nobody"] = ask(url, *each)
        said[f"{name}, as a worker"] = ask(url, *each, **named)
        said[f"{name}, by its token"] = ask(url, *each, **capability(token))
    for each in public:
        url, name = targets["public"], f"{each[0]} {each[1]}"
        said[f"{name}, as nobody"] = ask(url, *each)
        said[f"{name}, by its token"] = ask(url, *each, **bearer)
    said["GET /, as nobody"] = ask(targets["public"], "GET", "/")
    said["POST /sign-in, by its token"] = sign_in(targets["public"], token)
    return said


def sign_in(url: str, token: str) -> list[Any]:
    """As the form of the console does."""
    form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": url}
    said = f"token={token}".encode()
    request = urllib.request.Request(f"{url}/sign-in", said, form, method="POST")
    try:
        with _OPENER.open(request, timeout=20) as answer:
            return ["done", answer.status]
    except urllib.error.HTTPError as error:
        with error:
            return [error.code, "page"]


def forgeries(api: Api, token: str) -> dict[str, str]:
    """Tokens that nobody has signed."""
    head, body, signature = token.split(".")
    header = part_of(token, 0)
    victim = api.targets["victim"]
    other = {**api.claims, "task_id": victim["task_id"], "attempt": victim["attempt"]}
    request = urllib.request.Request(f"{api.url}/internal/jwks/task")
    with _OPENER.open(request, timeout=20) as answer:
        public = answer.read()
    symmetric = f"{written({**header, 'alg': 'HS256'})}.{body}"
    by_public = encoded(hmac.digest(public, symmetric.encode(), "sha256"))
    made_up = f"{written({**header, 'kid': 'made-up'})}.{body}"
    middle = len(signature) // 2
    swapped = "A" if signature[middle] != "A" else "B"
    return {
        "tampered": f"{head}.{body}.{signature[:middle]}{swapped}{signature[middle + 1 :]}",
        "for another task": f"{head}.{written(other)}.{signature}",
        "alg none": f"{written({**header, 'alg': 'none'})}.{body}.",
        "alg none, signed": f"{written({**header, 'alg': 'none'})}.{body}.{signature}",
        "by the public key": f"{symmetric}.{by_public}",
        "by its own key": signed(f"{head}.{written(other)}"),
        "by a key of a made-up name": signed(made_up),
        "truncated": f"{head}.{body}.{signature[:40]}",
    }


def signed(message: str) -> str:
    """By ES256, with a key that is made for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    r, s = utils.decode_dss_signature(key.sign(message.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{message}.{encoded(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def part_of(token: str, place: int) -> Any:
    part = token.split(".")[place]
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def written(said: object) -> str:
    return encoded(json.dumps(said, separators=(",", ":")).encode())


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
