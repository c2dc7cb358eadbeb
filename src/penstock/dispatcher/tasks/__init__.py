"""The life of a task: `lifecycle` has the operations, `completion` how attempts end and publish."""

from __future__ import annotations
