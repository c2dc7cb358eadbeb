"""What goes over the wire: nothing that proves something is in a text of it."""

from __future__ import annotations

from penstock.protocol.work import HeldAsk, TaskResult


def test_no_repr_has_a_proof_in_it() -> None:
    held = HeldAsk(task_id=7, attempt=2, lease_token="a lease", token="a token")
    assert repr(held) == "HeldAsk(task_id=7, attempt=2, lease_token=…, token=…, progress=None)"
    assert "secret" not in repr(TaskResult(task_id=7, status=200, token="secret"))
