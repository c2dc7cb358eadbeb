"""The query service: SQL over published datasets, in processes that can reach nothing else."""
