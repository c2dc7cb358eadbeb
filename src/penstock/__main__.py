"""`python -m penstock` is the installed command."""

from __future__ import annotations

from penstock.cli import main

if __name__ == "__main__":
    main()
