"""What ends a simulation other than the simulated code itself.

```
SimulationError
├── Deadlock        nothing can run any more, and something is still awaited
├── Exhausted       a bound on virtual seconds or on steps was reached
├── Unhandled       an exception that nobody caught or looked at
└── NotSimulated    a socket, process, signal or thread was asked for
```

Raised by `penstock.testing.virtual.loop`; whoever runs a simulation sees them.
"""

from __future__ import annotations

from penstock.kernel.errors import PenstockError


class SimulationError(PenstockError):
    """A simulation could not go on, or must not be believed."""


class Deadlock(SimulationError):
    """No callback is ready, no timer is set, and something is still awaited."""


class Exhausted(SimulationError):
    """The simulation reached its bound on virtual seconds or on steps."""


class Unhandled(SimulationError):
    """A callback raised, or a task failed and nobody looked; the cause is that exception."""


class NotSimulated(SimulationError, NotImplementedError):
    """The real world was asked for.

    It is a `NotImplementedError` as well, which is what asyncio's own loops raise where a
    platform lacks something: code that can live without, say, signals goes on without them.
    """
