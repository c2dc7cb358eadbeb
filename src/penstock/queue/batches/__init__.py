"""Batches: tasks that are waited for together, and a task for when all of them have ended.

A batch has any number of packs, each of which has the batch's id in it. Besides them:

- `batches/open/{id}.json`, written by the producer before the first pack, and once more when it
  seals the batch: what belongs to it, and what comes then.
- `batches/marks/{id}/{pack}~…`, written by whoever settles a pack of it or finds one settled: how
  its tasks have ended. The key says it all.
- `batches/ended/{id}.json`, created once, when every pack of a sealed batch has a mark: how the
  batch has ended.
- The task that comes then, submitted with a key that is made from the batch's id.

States, and who moves them: *open* (the producer adds packs), *sealed* (the producer has written the
list of its packs, in one swap), *ended* (whoever finds all marks has created the record). Then that
same one, or another, submits the task that comes then, deletes the open object, and last the marks:
as long as the open object is there, somebody will see to the batch.

| dies | leaves |
|---|---|
| the producer, before it seals | an open batch: its tasks run; it never ends, and is forgotten |
| a worker between settling and marking | no mark: written by the chore, or before archiving |
| whoever ends it, before the record | all marks: the next who looks ends it |
| the same, after the record | the open object: the next submits the same key again |
| the same, after the open object | marks of nobody, which are deleted within a day or two |

**Why the task that comes then is submitted once.** As for the ticks of schedules
(`penstock.queue.schedules.minding`): it is a submit with a key, of the moment r that was noted
before the open object was read. It comes to nothing if it arrives later than W (R2), or beside the
tombstone of an earlier one (R6), if only r < u + `KEPT_SECONDS`, where u is when the earlier one
succeeded. The record says when it was made, and nobody submits before that: so it is enough that r
is less than `KEPT_SECONDS` after it. Otherwise, when somebody died and nobody came for a day, it is
first asked whether there is such a task. Who has read the open object before it was deleted cannot
use it for longer than W, even if the record is forgotten by then. How the batch has ended is
decided once, by the record: everybody submits the same counts.

A pack that a failed submit has perhaps written does not belong to the batch, though it says so:
only what is on the sealed list counts.

`documents` is what is stored, `marks` how it is counted, `ending` how it ends, `hearing` is the
worker's part, `minding` the chore, `showing` and `api` the users' side.

**What it costs.** The producer: 3 puts, a GET and a LIST, besides the packs. Each pack: a put for
its mark, and a GET and a LIST by the worker to see whether that was the last (each time if few are
missing, otherwise once in five seconds). The end: a put, and two for the task that comes then. So a
batch of one pack costs $0.00005 more than its tasks alone. The chore: a GET in 15 s to two minutes
for each batch that has not ended, and a LIST if it is sealed; if there is none, nothing but the
bell and a LIST in a quarter of an hour, one and a half cents a month.
"""
