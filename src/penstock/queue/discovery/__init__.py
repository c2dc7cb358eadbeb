"""How workers find tasks: one contract; the modes `leased`, `direct`, `shared`, `sampled`."""

from __future__ import annotations
