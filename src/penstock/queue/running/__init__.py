"""What a worker does with what it finds: claim, run, settle."""
