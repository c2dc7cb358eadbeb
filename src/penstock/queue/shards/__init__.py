"""Shard leases: who owns which shard, kept in the bucket. The protocol is in `leases`."""

from __future__ import annotations
