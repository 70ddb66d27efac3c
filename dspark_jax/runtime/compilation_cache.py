"""Compiled programs are kept between runs, by jax's own persistent compilation cache.

The folder is the first of these:

    DSPARK_COMPILATION_CACHE    a folder; empty: nothing is kept
    XDG_CACHE_HOME              dspark_jax/compiled in it
    the system's cache folder   dspark_jax/compiled in ~/.cache, ~/Library/Caches or %LOCALAPPDATA%

Where jax has a setting of its own (JAX_COMPILATION_CACHE_DIR, `jax_compilation_cache_dir`, or
`jax_enable_compilation_cache` off), that one holds and nothing is done here.

jax's key of a program holds the program, the releases of jaxlib and of the platform's compiler, all
compiler options, XLA_FLAGS and the processor's features. It lacks the number of processor cores,
for which XLA compiles too, and holds less where XLA cannot describe the processor. Both name a
subfolder, so that machines of different kinds can share a home.

jax writes an entry in place and never replaces one. After a killed process or on a full disk half
of one stays, of which jax would warn at every start: `enable` removes it. Where the folder has
grown too large, it removes what was not used for longest. (jax's own limit needs another package,
locks at every access, and fails for good once one of its files is missing.)
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path

VARIABLE = "DSPARK_COMPILATION_CACHE"
LARGEST = 512 << 20  # bytes, all subfolders together, when a process begins
LEAST_FREE = 32 << 20  # bytes on the disk; below, nothing is kept
SETTLED = 5.0  # seconds after which an entry is surely written
_CHECKED = ".checked"  # its time is until when the entries of its folder were checked


def enable(own_process: bool = False) -> Path | None:
    """Has jax keep compiled programs from now on. Returns where, None if this changed nothing.

    Uses no device, may be called often, and only warns, once, of a folder that cannot be written.

    own_process: the process runs nothing but ours, so small programs are kept too. Otherwise it may
      run programs of its own, and jax's least time, a second of compiling, is left as it is.
    """
    from jax import config

    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return None
    if (folder := _prepared(os.environ.get(VARIABLE))) is None:
        return None
    config.update("jax_compilation_cache_dir", str(folder))
    if own_process and "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


@functools.cache
def _prepared(wanted: str | None) -> Path | None:
    """This machine's subfolder, writable and in order. None, after a warning, if there is none."""
    if wanted == "":
        return None
    try:
        root = default_root() if wanted is None else Path(wanted).expanduser().absolute()
        folder = root / machine()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies in it is run as our code
        tempfile.TemporaryFile(dir=folder).close()
        _require_room(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        warnings.warn(
            f"compiled programs are not kept: {error}; set {VARIABLE} to a folder that "
            "can be written, or to nothing",
            stacklevel=3,
        )
        return None
    with contextlib.suppress(OSError):  # the next process tries again
        remove_damaged(folder)
        prune(root)
    return folder


def _require_room(folder: Path) -> None:
    """On a full disk jax would begin every entry, and warn of every one."""
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        raise OSError(
            errno.ENOSPC, f"{free >> 20} MiB are free, {LEAST_FREE >> 20} are needed", str(folder)
        )


def default_root() -> Path:
    """Where compiled programs are kept unless VARIABLE says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification has relative ones ignored
        windows = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
        base = {"darwin": "~/Library/Caches", "win32": windows}.get(sys.platform, "~/.cache")
    return Path(base).expanduser() / "dspark_jax" / "compiled"


def machine() -> str:
    """A name for what this machine's code depends on beside jax's key: its cores, its processor."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    told = {f"{cores}, {os.environ.get('NPROC')}", platform.system(), platform.machine()}
    kinds = "model name", "flags", "Features", "CPU "
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        told |= {line for line in lines if line.startswith(kinds)}
    except OSError:
        pass  # not Linux
    return hashlib.sha256("\n".join(sorted(told)).encode()).hexdigest()[:16]


def remove_damaged(folder: Path) -> None:
    """Removes entries that cannot be unpacked, of those written since the last time."""
    marker, until = folder / _CHECKED, time.time() - SETTLED
    since = marker.stat().st_mtime if marker.exists() else 0.0
    for path, status in _files(folder):
        if path.name.endswith("-cache") and since < status.st_mtime <= until and not _whole(path):
            path.unlink(missing_ok=True)
    marker.touch()
    os.utime(marker, (until, until))


def prune(root: Path, largest: int = LARGEST) -> None:
    """Removes the files that were not used for longest until the rest takes at most `largest`.

    Many file systems note a use once a day only, some never; then the time of writing counts.
    """
    files = list(_files(root))
    total = sum(status.st_size for _, status in files)
    for path, status in sorted(files, key=lambda f: max(f[1].st_atime, f[1].st_mtime)):
        if total <= largest:
            break
        path.unlink(missing_ok=True)
        total -= status.st_size


def _files(folder: Path):
    """Files below `folder` with their os.stat_result. Other processes may remove some meanwhile."""
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                yield path, path.stat()


def _whole(path: Path) -> bool:
    """Whether jax can unpack an entry. What zstd packs, which jax prefers, has no checksum."""
    try:
        packed = path.read_bytes()
        if packed[:4] == b"\x28\xb5\x2f\xfd":
            import zstandard

            zstandard.ZstdDecompressor().decompress(packed)
        else:
            zlib.decompress(packed)
    except (ImportError, OSError):
        return True
    except Exception:  # every way of packing has its own
        return False
    return True
