"""The client of people and their programs: everything that the public listener offers.

| module | owns |
|---|---|
| `client` | `Client`: one method a request |
| `connection` | HTTP: what is retried, and which error an answer is; the only importer of httpx |
| `waiter` | polling until something is over |
| `dag_files` | the text of a DAG, and of the files that it names (PyYAML), within bounds |

`Client` is `penstock.Client`. It can be imported where httpx is not installed, and says so when
it is opened.
"""

from __future__ import annotations

from penstock.dispatcher.client.client import Client as Client
