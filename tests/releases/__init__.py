"""What earlier releases have said and written, kept as files, and tests that today's code reads it.

A folder a release. `python -m tests.releases.record VERSION` makes one, when a release is made;
from then on its files never change. See CONTRIBUTING.md.
"""
