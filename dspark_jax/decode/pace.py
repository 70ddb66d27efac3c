"""How many rounds a call makes before the host hears of them."""

from __future__ import annotations

import time

import jax

from dspark_jax.decode.state import ROUNDS_PER_CALL

LATENCY = 0.01  # seconds that a token may wait for others; nobody sees it


class Pace:
    """Always the same number of rounds, or as many as take LATENCY: a call costs the host something
    beside its rounds, which shows where a round takes a millisecond.

    rounds: the number; None: by time. One round a call to begin with, and always where several
    processes must make the same calls.
    """

    def __init__(self, rounds: int | None):
        self._by_time = rounds is None and jax.process_count() == 1
        self.rounds = rounds or 1
        self._last: float | None = None

    def heard(self, rounds: int) -> None:
        """A call has been heard of, and what it said has been passed on."""
        now = time.perf_counter()
        if self._by_time and self._last is not None and rounds:
            each = (now - self._last) / rounds
            most = min(ROUNDS_PER_CALL, 2 * self.rounds)
            self.rounds = max(1, min(most, int(LATENCY / each)))
        self._last = now
