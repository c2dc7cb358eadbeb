"""The HTTP side of the dispatcher: two listeners, one table of endpoints for each.

| module | owns |
|---|---|
| `routes` | all endpoints, and the two applications: `internal_app`, `public_app` |
| `endpoints` | what an endpoint is, and the OpenAPI document of a table |
| `application` | a request becomes a call of a handler, within bounds; every failure a `Problem` |
| `requests`, `problems` | parsing of requests within bounds; which problem stands for which error |
| `auth` | who calls, and by which proof |
| `context` | what handlers work with |
| `group_commit` | concurrent calls made as one |
| `server` | the listeners, on uvicorn |
| `*_endpoints` | the handlers, by who asks and about what |

Handlers have no state and hold no locks: each decodes, calls one operation, and reports the
result. The internal listener is for workers and sources; nothing of it is on the public one.
"""

from __future__ import annotations
