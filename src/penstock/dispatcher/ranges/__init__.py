"""The runtime `dispatcher`: `operators` runs what the platform has, `cutting` knows the ranges.

`calendars` knows those that are days, weeks, months and years.
"""
