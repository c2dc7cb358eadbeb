"""Side effects: written in the transaction that wants them, carried out after it.

`relay` has the protocol; `values` says what a carrier is; `carriers` has those for wake-ups;
`outbox` is what people see and steer; `reconciler` finds what a lost word has left waiting.
"""
