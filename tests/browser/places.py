"""Where every page of the console is, for the partitions that the installation was seeded with."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from penstock.console.pages.dataset import partition_path
from penstock.console.pages.table import SITE
from tests.browser.installation import ODD, PLAIN, RUDE, Installation

PATHS = tuple(dict.fromkeys(page.path for page in SITE.pages))
WHOLE_PATHS = tuple(path for path in PATHS if "{" not in path)
"""The pages that are there before anything else is."""

_GIVEN = {
    "/jobs/{name:path}": ("/jobs/rude", "/jobs/-odd_-name-", "/jobs/feed"),
    "/datasets/{name:path}": (
        *("/datasets/fresh", "/datasets/_", "/datasets/rude", "/datasets/news"),
        "/datasets/alerts",
    ),
    "/datasets/{name}/rejected": ("/datasets/alerts/rejected",),
    "/datasets/{name}/partitions": ("/datasets/fresh/partitions", "/datasets/rude/partitions"),
    "/datasets/{name}/partitions/{key:path}": (
        partition_path("fresh", ODD),
        partition_path("rude", RUDE),
        partition_path("partitions", PLAIN),
    ),
    "/datasets/{name}/partition": ("/datasets/fresh/partition",),
    "/datasets/{name}/contents": (f"/datasets/fresh/contents?key={quote(ODD, safe='')}",),
    "/operations/sources/{job:path}": ("/operations/sources/feed", "/operations/sources/nightly"),
    "/operations/backfills/new": (
        "/operations/backfills/new",
        "/operations/backfills/new?preview=1&job=quick&by=keys&keys=a%0Ab&concurrency=10",
    ),
    "/operations/versions": ("/operations/versions", "/operations/versions?version=before"),
    "/tasks": ("/tasks", "/tasks?status=dead", "/tasks?status=cancelled"),
    "/queue/tasks": ("/queue/tasks", "/queue/tasks?status=failed&type=x"),
}


def addresses(path: str, installation: Installation) -> Sequence[str]:
    """Where a page of the table is, in one or several ways."""
    if path in _GIVEN:
        return _GIVEN[path]
    if path == "/tasks/{id:path}":
        rude = installation.task("rude", RUDE)
        return [f"/tasks/{rude}", f"/tasks/{installation.task('-odd_-name-', ODD)}"]
    if path == "/datasets/{name}/snapshot":
        (latest, *_) = installation.client.get("/v1/datasets/fresh/snapshots").json()["snapshots"]
        return [
            f"/datasets/fresh/snapshot?id={latest['id']}",
            f"/datasets/fresh/contents?key={quote(ODD, safe='')}&at={latest['id']}",
        ]
    if path == "/backfills/{id:path}":
        (first, *_) = installation.client.get("/v1/backfills").json()["backfills"]
        return [f"/backfills/{first['id']}"]
    if path == "/queue/task/{id:path}":
        return [f"/queue/task/{installation.queued()}?name=seen"]
    assert "{" not in path, f"Say in {__name__} where an example of {path} is."
    return [path]
