"""How data gets into Spark and out of it: one interface, and a way for each kind of place."""
