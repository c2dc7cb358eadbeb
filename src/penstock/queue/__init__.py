"""The bucket queue: a distributed task queue that lives in an object store alone.

Being built. Here today: where things are (`layout`), what a pack and a ledger hold (`pack`,
`ledger`), every change that a ledger can undergo, as pure functions (`transitions`), and the order
of reads and writes around them (`claims`), and submitting (`submission`). To come: keys, discovery,
the worker, the monitor.
"""
