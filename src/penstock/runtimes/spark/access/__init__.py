"""How Spark reads and writes data: one interface (`base`), and an implementation for each storage.

| where data lies, and Spark runs | module |
|---|---|
| a bucket, with our jar or Hadoop's S3A; local masters read through a cache | `object_store` |
| a folder that Spark and this process see | `folder` |
| a bucket, and a Connect server without jars | `remote` |

`choosing` selects one. `parquet` has what is done to the files that a write leaves, and
`frame_metadata` what is added to frames.
"""

from __future__ import annotations
