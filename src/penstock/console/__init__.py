"""The web console: shows the state of an installation, and lets operators control it.

Pages are rendered on the server, by templates that escape every value; nothing that a task has
printed or named is ever HTML. Scripts are small modules of our own, and everything comes from
this server: a strict content security policy allows nothing else. What changes on a page is
rendered again and sent as server-sent events (`live`), once for all viewers of the same page.

| part | does |
|---|---|
| `application` | routes requests to pages, actions, static files or the event stream; who may |
| `http` | reads requests within bounds; responses with security headers, cookies and events |
| `sessions` | sign-in, sign-out, roles, and the check that a form comes from this console |
| `renderer` | templates, static files, and the format of times, sizes and numbers |
| `live` | server-sent events: what has changed on a page |
| `dag_layout` | coordinates of the DAG and of lineage |
| `charts` | coordinates of plots, shards, time lines and heat maps |
| `preview` | the first rows of a partition's files |
| `pages/` | one module a resource: its list, its page, its forms; `pages.table` lists them all |

The only state is in the sessions' cookies and in memory: which pages are viewed. A crash loses
a view.
"""

from __future__ import annotations
