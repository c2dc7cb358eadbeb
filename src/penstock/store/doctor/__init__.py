"""Can this bucket be trusted? `examine` tries every promise that Penstock builds on.

See `penstock.store.doctor.examination` for what is tried, `penstock.store.doctor.second` for the
half of it that another process does.
"""
