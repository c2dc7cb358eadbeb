"""Schedules: tasks that are submitted at the times of a cron expression, once a tick.

`ticks` says which ticks are due, `document` what is stored, `checking` what is refused, `api` is
the users' side, and `minding` is the chore that submits: there is the protocol.
"""
