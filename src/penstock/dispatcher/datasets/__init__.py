"""What becomes of published data: projection for readers without Postgres, sweeping, maintenance.

| module | owns |
|---|---|
| `projector` | `current.json`: written after each publication, and repaired when somebody asks |
| `sweeper` | the folders of attempts that nobody needs, and the passes that remove them |
| `maintainer` | tasks that compact and cluster files in place |

Publishing itself is `tasks.completion`; how much is kept is `dispatcher.retention`.
"""

from __future__ import annotations
