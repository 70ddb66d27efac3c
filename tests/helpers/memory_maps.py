"""A process may have 65,530 memory maps on Linux. XLA needs some thousand for each of our programs
on a CPU, and a process that runs out of them crashes.
"""

import gc
from pathlib import Path

import jax

from helpers import quick

MAPS = Path("/proc/self/maps")
MOST = 35_000  # before a file of tests, of which the largest need some 20,000


def free_programs_if_many() -> None:
    """Gives up all compiled programs of this process where they have taken that many."""
    if not MAPS.exists() or MAPS.read_bytes().count(b"\n") < MOST:
        return
    for cached in quick.all_caches():
        cached.cache_clear()
    jax.clear_caches()
    gc.collect()
