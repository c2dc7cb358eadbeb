"""Plans of partitions to compute: `backfills` has the operations, `plans` what a plan may be,
`advancing` makes tasks of one."""
