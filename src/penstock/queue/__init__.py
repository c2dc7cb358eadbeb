"""The bucket queue: a distributed task queue that lives in an object store alone.

`penstock.Queue` and `penstock.Worker` are the way in; docs/queue.md is for users, and the section
on the queue in docs/architecture.md says which module owns what.
"""
