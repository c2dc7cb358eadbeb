"""The web console: what people see of an installation, and steer it by.

Pages are rendered on the server, by templates that escape whatever they are given; what a task has
printed or named is never HTML. Scripts are small modules of our own, and everything comes from this
server: a strict content security policy allows nothing else. What changes on a page is rendered
again and sent as server-sent events (`live`), once for all who look at the same page.

| part | does |
|---|---|
| `application` | what a request is answered with: pages, forms, files, the stream; who may |
| `sessions` | who is signed in, as what, and that a form is from here |
| `rendering` | templates, and the words, figures and times in them |
| `live` | what has changed on a page, for those who look at it |
| `pages/` | one module a page: what it shows, by what is asked of the dispatcher |
| `alone` | what the pages of queues are given where there is no dispatcher |
| `drawing/` | the DAG in layers, heat maps, time lines, plots: coordinates only |

Nothing here keeps state but the sessions' cookies and who looks at what. A crash loses a view.
"""
