"""How workers find tasks: one module a mode, one contract."""
