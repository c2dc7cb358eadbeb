"""The pages, one module a resource; `table` lists all pages and actions."""

from __future__ import annotations
