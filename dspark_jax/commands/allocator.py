"""Memory for training. Large buffers come and go with every step: as glibc's malloc is set, a third
of the time goes into pages that are given back and asked for again.
"""

import os
import sys

# Read by glibc when a process begins, so they are set in one that takes this one's place.
SETTINGS = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_TOP_PAD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}


def settle(arguments: list[str]) -> None:
    """Where a command trains, begins it anew under SETTINGS, those of the user first."""
    trains = arguments[:1] == ["train"] and not {"-h", "--help"} & set(arguments)
    if trains and sys.platform == "linux" and not SETTINGS.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**SETTINGS, **os.environ})
