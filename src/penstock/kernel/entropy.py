"""The only source of randomness, and the ids made from it.

Jitter, ids and nonces come from an `Entropy` that is handed in, so that a simulation is a
function of its seed. `system_entropy()` is seeded by the operating system and is what
production uses; ids of 120 random bits from it do not collide.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_PAIRS = tuple(low + high for high in _ALPHABET for low in _ALPHABET)

Item = TypeVar("Item")


class Entropy(Protocol):
    """Random choices; `random.Random` and `random.SystemRandom` are such."""

    def random(self) -> float: ...

    def uniform(self, a: float, b: float) -> float: ...

    def randrange(self, start: int, stop: int | None = None, /) -> int: ...

    def getrandbits(self, k: int, /) -> int: ...

    def choice(self, seq: Sequence[Item], /) -> Item: ...


def system_entropy() -> Entropy:
    """Randomness of the operating system, different in every process."""
    return random.SystemRandom()


def seeded_entropy(seed: int | str) -> Entropy:
    """Randomness that is the same for the same seed, on every machine."""
    return random.Random(seed)


def new_id(entropy: Entropy, *, characters: int = 24) -> str:
    """A random id of lower-case letters and digits, five bits a character."""
    bits = entropy.getrandbits(5 * characters)
    drawn = "".join([_PAIRS[bits >> at & 1023] for at in range(0, 5 * characters, 10)])
    return drawn[:characters]
