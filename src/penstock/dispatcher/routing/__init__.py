"""Events in, tasks out: `router` has the operations, `filters` the form of a stored filter."""
