"""The protocol: what goes over HTTP between the dispatcher and workers, sources and people.

One definition for both ends: the API decodes what it is sent into these, strictly, and the
clients decode what they are answered. Requests end in `Ask`. An unknown field of a request is
an error; one of an answer is from a later release and is ignored. Times are the database's.
Where a call is about several tasks, each has its own answer, with the status that it would have
had alone.

`identity` is who calls the internal listener; `problem` is why something was refused. Used by
the dispatcher's API and client, the worker, and sources. The names of these classes are in the
OpenAPI documents.
"""

from __future__ import annotations
