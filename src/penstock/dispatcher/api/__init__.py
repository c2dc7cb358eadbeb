"""The HTTP side of the dispatcher: two listeners, one table of endpoints for each.

| module | owns |
|---|---|
| `endpoints` | what an endpoint is, what a handler is given, and what it answers |
| `application` | a request becomes a call of a handler, within bounds; every failure a `Problem` |
| `requests` | what a request says, read within bounds |
| `problems` | which problem stands for which refusal or error |
| `openapi` | the OpenAPI document of a table |
| `parts` | what handlers work with |
| `gathering` | calls that come at the same time, made as one |
| `table` | all endpoints, and the two applications: `internal_app`, `public_app` |
| `working`, `telling`, `deploying`, `steering`, `looking`, `datasets` | the handlers |

Handlers have no state and hold no locks: each decodes, calls one operation of a part, and says what
came of it. The internal listener is for workers and sources; nothing of it is on the public one.
"""
