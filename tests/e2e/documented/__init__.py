"""Every command that a page shows is run.

The commands are taken from the pages (`tests.pages`), so that there is no list of them here. What a
page leaves open (`ID`, `NAME`, `s3://BUCKET/PREFIX`) is filled in by `tables`; `plan` makes of it
what is run, each once, in which order and in which of the `worlds`; the few that cannot be run here
stand in `tables` with the reason, or with the test that runs them.
"""
