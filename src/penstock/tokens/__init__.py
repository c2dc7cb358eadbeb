"""Capability tokens: what they say, who signs them, who verifies them.

A service that is shown tokens verifies them with the keys that a dispatcher publishes:

    verifier = Verifier(HttpKeys("http://dispatcher:8081/internal/jwks/task"),
                        issuer="penstock/default", audience="penstock:task")
    claims = await verifier.verify(token)  # or TokenRefused
    allowed = [Scope.parse(each) for each in claims.grants.write_prefixes]
"""

from penstock.kernel.errors import TokenRefused
from penstock.tokens.claims import Claims, Grants, ReadGrant, WriteGrant
from penstock.tokens.jwks import HttpKeys
from penstock.tokens.scopes import Scope
from penstock.tokens.verifying import Verifier

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
