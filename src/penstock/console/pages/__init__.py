"""The pages: one module each, and the table of all of them in `table`."""
