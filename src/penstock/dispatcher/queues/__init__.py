"""The queues in the dispatcher's bucket, for people: its own wake-ups, and any other."""
