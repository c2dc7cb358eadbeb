"""The bucket queue: a distributed task queue that lives in an object store alone.

Being built. Here today: where things are (`layout`), what a pack and a ledger hold (`pack`,
`ledger`), and every change that a ledger can undergo, as pure functions (`transitions`).
"""
