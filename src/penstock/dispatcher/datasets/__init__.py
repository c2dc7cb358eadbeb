"""What becomes of what was published: the book of its folders, sweeping, and how much is kept.

| module | owns |
|---|---|
| `book` | which folders of attempts nobody needs any more, as the database knows it |
| `sweeping` | walks through the store by that book, again and again or when somebody asks |
| `keeping` | what a DAG's `keep` says: partitions and generations that are dropped |

Publishing itself is `tasks.ending`, and what readers without Postgres are told `outbox.projecting`.
"""
