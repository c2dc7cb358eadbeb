"""One partition as a person sees it, and what is in it."""

from __future__ import annotations

from urllib.parse import quote

from penstock.datasets.layout import DATASETS
from penstock.datasets.manifest import File, Manifest, ManifestInput, digest, encode
from penstock.datasets.schema import Column
from penstock.kernel.clock import SystemClock
from penstock.protocol.work import Assignment
from penstock.store.memory import MemoryBucket, MemoryStore
from tests.integration.console.looking import Look, Visitor, words
from tests.integration.console.publishing import EVIL, publish
from tests.integration.dispatcher.api.stage import ROOT, held, ok, output, place
from tests.integration.dispatcher.test_deployment import chain


def test_a_partition_tells_who_has_made_it_and_of_what(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        key = f"2026/01 {EVIL}"
        (task,) = await publish(visitor, key)
        path = f"/datasets/tidy/partitions/{quote(key, safe='')}"
        status, page = await visitor.get(path)
        assert status == 200
        said = words(page)
        assert EVIL not in page
        assert key in said
        assert f"task {task.task_id} , attempt 1, on worker" in said
        assert "3 rows in 2 files, 300 B" in said
        assert "an event without data" in said
        assert f'href="/datasets/daily/partitions/{quote(key, safe="")}"' in page
        assert f'data-key="t-{task.task_id}"' in page
        assert path in (await visitor.get("/datasets/tidy"))[1]
        # A task of the job that follows would read it.
        below = words((await visitor.get(path.replace("tidy", "daily")))[1])
        assert "one part, revision 1" in below

    console(story)


def test_keys_that_cannot_stand_in_a_path_have_pages(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "..")
        page = (await visitor.get("/datasets/tidy"))[1]
        assert 'href="/datasets/tidy/partition?key=.."' in page
        status, shown = await visitor.get("/datasets/tidy/partition?key=..")
        assert status == 200
        assert "3 rows in 2 files" in words(shown)

    console(story)


def test_what_has_no_partitions_is_shown_as_a_whole(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        ok(await visitor.stage.public.post("/v1/trigger", json={"job": "feed", "event_id": "1"}))
        await visitor.stage.route()
        await publish(visitor)
        page = (await visitor.get("/datasets/tidy"))[1]
        assert 'href="/datasets/tidy/partition"' in page
        assert "data-heat" not in page
        status, shown = await visitor.get("/datasets/tidy/partition")
        assert status == 200
        assert "All of tidy" in words(shown)

    console(story)


def manifest_of(task: Assignment, body: bytes, name: str) -> bytes:
    """A manifest of one file."""
    return encode(
        Manifest(
            dataset="tidy",
            generation=task.generation,
            job="clean",
            task_id=task.task_id,
            attempt=task.attempt,
            partition_key="p",
            rows=1,
            bytes=len(body),
            columns=(Column("a", "string"),),
            files=(File(name=name, rows=1, bytes=len(body), sha256="0" * 64),),
            inputs=(
                ManifestInput(
                    input="raw",
                    dataset="raw",
                    generation=task.generation,
                    location="x",
                    partition_key="p",
                    revision=7,
                ),
            ),
        )
    )


async def published(visitor: Visitor, store: MemoryStore, event: str, body: bytes) -> int:
    """Have the partition `p` published, as a file with a manifest; its task."""
    asked = {"job": "feed", "partition_key": "p", "event_id": event}
    ok(await visitor.stage.public.post("/v1/trigger", json=asked))
    await visitor.stage.route()
    (task,) = await visitor.stage.claim()
    folder = place(task).removeprefix(f"{ROOT}/")
    assert folder.startswith(DATASETS)
    manifest = manifest_of(task, body, "part-0.csv")
    await store.put(f"{folder}/part-0.csv", body)
    await store.put(f"{folder}/manifest.json", manifest)
    facts = {"files": 1, "rows": 1, "bytes": len(body), "manifest": digest(manifest)}
    facts["columns"] = [{"name": "a", "type": "string"}]
    ok(await visitor.stage.complete(held(task, outputs=[output(task, facts=facts)])))
    return task.task_id


def test_a_snapshot_leads_to_what_it_changed_and_to_rows_as_they_were(console: Look) -> None:
    store = MemoryStore(MemoryBucket(SystemClock()), clock=SystemClock())

    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        tasks, snapshots = [], []
        for event in ("old", "new"):
            visitor.world.later(2)
            tasks.append(await published(visitor, store, event, f"it is {event}\n".encode()))
            made = ok(await visitor.stage.public.get("/v1/datasets/tidy/snapshots"))["snapshots"]
            snapshots.append(made[0]["id"])
        first, second = snapshots
        page = (await visitor.get(f"/datasets/tidy/snapshot?id={second}"))[1]
        changed, shown = words(page).split("Changes")[1].split("Contents")
        assert f"added p {tasks[1]} 1 10 B removed p {tasks[0]} 1 10 B" in changed
        assert f"p {tasks[1]} 1 10 B" in shown
        assert f"p {tasks[0]} " not in shown
        assert f'href="/datasets/tidy/snapshot?id={first}"' in page
        for at, said in ((first, "it is old"), (second, "it is new")):
            link = f"/datasets/tidy/contents?key=p&amp;at={at}"
            assert link in page
            then = words((await visitor.get(link.replace("&amp;", "&")))[1])
            assert said in then
            assert f"Snapshot {at}" in then
        for path in ("snapshot?id=7", "snapshot?id=x", "contents?key=p&at=7", "contents?at=x"):
            status, page = await visitor.get(f"/datasets/tidy/{path}")
            assert (status, "no longer" in words(page)) == (404, True), path

    console(story, store=store)


def test_what_is_in_a_partition_is_shown_through_the_store(console: Look) -> None:
    store = MemoryStore(MemoryBucket(SystemClock()), clock=SystemClock())

    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await published(visitor, store, "p", f"a,b\n1,{EVIL}\n".encode())
        page = (await visitor.get("/datasets/tidy/partitions/p"))[1]
        assert 'data-fetched="/datasets/tidy/contents?key=p"' in page
        status, shown = await visitor.get("/datasets/tidy/contents?key=p")
        assert status == 200
        assert EVIL not in shown
        assert f"a,b 1,{EVIL}" in words(shown)
        assert "part-0.csv" in words(shown)
        assert "Revision raw p 7" in words(shown)

    console(story, store=store)


def test_what_was_appended_is_listed_by_its_keys(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        append = "    update: append\n    inputs: [raw]"
        ok(await visitor.stage.apply(chain().replace("    inputs: [raw]", append)))
        await visitor.stage.trigger("p")
        (task,) = await visitor.stage.claim()
        said = output(task, append_key=f"k {EVIL}")
        ok(await visitor.stage.complete(held(task, outputs=[said])))
        page = (await visitor.get("/datasets/tidy/partitions/p"))[1]
        assert EVIL not in page
        assert f"Appended parts Key When Task Rows Size k {EVIL}" in words(page)
        # No store is there to be read.
        shown = words((await visitor.get("/datasets/tidy/contents?key=p"))[1])
        assert "This dispatcher has no store." in shown

    console(story)
