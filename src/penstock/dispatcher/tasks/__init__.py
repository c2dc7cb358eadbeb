"""The life of a task: `lifecycle` has the operations, `ending` what follows from an end."""
