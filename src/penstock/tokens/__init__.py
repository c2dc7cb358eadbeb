"""Capability tokens: what they say, who signs them, who verifies them.

A service that is shown tokens verifies them with the keys that a dispatcher publishes:

    verifier = Verifier(HttpKeys("http://dispatcher:8081/internal/jwks/task"),
                        issuer="penstock/default", audience="penstock:task")
    claims = await verifier.verify(token)  # or TokenRefused
    allowed = [Scope.parse(each) for each in claims.grants.write_prefixes]

Workers import `scopes` and verify nothing: what needs cryptography is imported when asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.kernel.errors import TokenRefused
from penstock.tokens.scopes import Scope

if TYPE_CHECKING:
    from penstock.tokens.claims import Claims, Grants, ReadGrant, WriteGrant
    from penstock.tokens.verifier import HttpKeys, Verifier

__all__ = [
    "Claims",
    "Grants",
    "HttpKeys",
    "ReadGrant",
    "Scope",
    "TokenRefused",
    "Verifier",
    "WriteGrant",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = "verifier" if name in {"HttpKeys", "Verifier"} else "claims"
    return getattr(import_module(f"{__name__}.{found}"), name)
