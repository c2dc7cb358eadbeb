"""The client of people and their programs: everything that the public listener offers.

| module | owns |
|---|---|
| `client` | `Client`: one method a request |
| `connection` | HTTP: what is repeated, and which error an answer is; the only importer of httpx |
| `opening` | the way to it, and what is said without httpx |
| `waiting` | asking again until something is over |
| `sending`, `files`, `named` | the text of a DAG file, and of the files that it names |

`Client` is `penstock.Client`. It can be imported where httpx is not installed, and says so when it
is opened.
"""

from penstock.dispatcher.client.client import Client as Client
