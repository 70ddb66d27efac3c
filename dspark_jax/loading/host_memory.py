"""How much memory this process can still get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

UNKNOWN = 2 << 30  # bytes; assumed where the machine does not tell


def available_memory(root: str | Path = "/") -> int:
    """Bytes that this process can get without swapping: the least of what the machine has left and
    what its control groups allow.

    Linux tells in proc/meminfo (MemAvailable) and sys/fs/cgroup (limit less usage, not counting
    file pages that can be dropped; of this process's group and all around it, version 1 or 2).
    Elsewhere it is half of the physical memory, or UNKNOWN.

    root: where these files are looked for; for tests.
    """
    root = Path(root)
    left = [*_left_on_machine(root / "proc/meminfo"), *_left_in_groups(root)]
    return max(0, min(left)) if left else _half_of_physical()


def _left_on_machine(meminfo: Path) -> Iterator[int]:
    fields = _fields(meminfo)
    if "MemAvailable:" in fields:
        yield fields["MemAvailable:"] * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        inner = base / group.lstrip("/")
        # In a container the path may be that of the host; then only the base is there.
        for directory in (inner, *inner.parents):
            yield from _left_in_group(directory, *names)
            if directory == base:
                break


def _left_in_group(directory: Path, limit: str, usage: str, droppable: str) -> Iterator[int]:
    most, used = _text(directory / limit).strip(), _text(directory / usage).strip()
    # Without a limit, version 2 has "max" here, version 1 a number beyond any memory.
    if most.isdecimal() and used.isdecimal():
        yield int(most) - int(used) + _fields(directory / "memory.stat").get(droppable, 0)


def _half_of_physical() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return UNKNOWN


def _fields(file: Path) -> dict[str, int]:
    """The first two words of every line, where the second is a number."""
    words = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdecimal()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
