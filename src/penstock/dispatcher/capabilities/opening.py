"""The parts of this package together, with the loops that they need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.dispatcher.capabilities.audit import Audit
from penstock.dispatcher.capabilities.holding import Holding, KmsKeys, PemFolder
from penstock.dispatcher.capabilities.issuing import Issuer
from penstock.dispatcher.capabilities.keys import TURN_SECONDS, Keys
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.looping import Loop
from penstock.kernel.aws import Aws
from penstock.kernel.service import Service

_AUDIT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a dispatcher issues, verifies and notes."""

    keys: Keys
    issuer: Issuer
    audit: Audit

    @property
    def services(self) -> list[Service]:
        """What has to run beside them, in the order of need."""
        return [
            *(self.audit, Loop("audit", self.audit.turn, idle_seconds=_AUDIT_SECONDS)),
            *(self.keys, Loop("keys", self.keys.turn, idle_seconds=TURN_SECONDS)),
        ]


def capabilities_of(database: Database, holding: Holding, *, root: str, org: str) -> Capabilities:
    """Those of a dispatcher whose store is at `root`."""
    keys = Keys(database, holding)
    issuer = Issuer(database, keys, root=root, org=org)
    return Capabilities(keys=keys, issuer=issuer, audit=Audit(database))


def holding_of(*, kms_key: str | None, folder: Path, aws: Aws) -> Holding:
    """Keys of KMS, or in a folder if there is no name of one."""
    return PemFolder(folder) if kms_key is None else KmsKeys(kms_key, aws=aws)
