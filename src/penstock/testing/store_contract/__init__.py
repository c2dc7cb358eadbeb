"""What every `ObjectStore` must do, as checks that run on any of them.

A check opens one or more clients of one empty store, and raises `AssertionError` where a promise
of `penstock.store.base` does not hold. No test framework is needed; with pytest:

    @pytest.mark.parametrize("name", STORE_CHECKS)
    def test_my_store(name):
        asyncio.run(STORE_CHECKS[name](open_client))

where `open_client` is an async function that opens another client of the same store each time it
is called, and the store is empty at first. The checks close no client.
"""

from __future__ import annotations

from typing import Final

from penstock.testing.store_contract import lists, objects, promises
from penstock.testing.store_contract.check import Check, OpenClient

__all__ = ["STORE_CHECKS", "Check", "OpenClient"]

STORE_CHECKS: Final[dict[str, Check]] = {
    check.__name__: check for check in (*objects.CHECKS, *lists.CHECKS, *promises.CHECKS)
}
