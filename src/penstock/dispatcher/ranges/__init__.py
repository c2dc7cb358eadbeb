"""The runtime `dispatcher`: `operators` runs what the platform has, `cutting` knows the ranges."""
