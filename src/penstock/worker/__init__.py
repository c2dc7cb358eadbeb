"""The pipeline worker: it hears that an operator has work, claims, runs, and tells what came out.

`worker` has the worker as its user sees it, `client` the way to the dispatcher. Between them stand
`appetite` (which operator to ask next), `attempt` (one attempt from claim to end), `heartbeats`
and `endings` (what is told of attempts, many at a time).
"""
