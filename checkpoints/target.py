"""The directory that a conversion writes to: one writer at a time, files that are whole or absent,
faults of the disk as one clear error.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax

from dspark_jax.checkpoints.errors import CheckpointError

LOCK = ".lock"


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """One conversion at a time may write here. The system releases the lock of a killed process.

    The lock file is removed in any case, and so is a new directory in which nothing was written.
    """
    if jax.process_index() != 0:
        yield
        return
    with writing(target):
        new = not target.exists()
        target.mkdir(parents=True, exist_ok=True)
        file = _locked(target)
    with file:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (target / LOCK).unlink()
                if new and not any(target.iterdir()):
                    target.rmdir()


def _locked(target: Path) -> IO[str]:
    """The lock file, open and locked.

    Another conversion may have removed it meanwhile: a lock on the old file excludes nobody, so a
    new file is tried.
    """
    while True:
        file = open(target / LOCK, "w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(target / LOCK)):
                return file
        except BlockingIOError:
            file.close()
            raise CheckpointError(
                f"{target}: another process is converting to this directory"
            ) from None
        except FileNotFoundError:
            pass
        file.close()


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Faults of the target's disk become one clear error. Orbax passes on TensorStore's, which are
    not OSErrors.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise  # not the disk: another process is gone, or a device is out of memory
    except (OSError, ValueError, RuntimeError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{target}: cannot be written ({cause}){_free(target)}. Run it again when the cause is "
            "gone: it goes on where it stopped"
        ) from error


def _free(target: Path) -> str:
    """Says how much room there is, where there is a place to ask about."""
    try:
        places = [target, *target.absolute().parents]
        free = shutil.disk_usage(next(filter(os.path.exists, places))).free
    except OSError:  # the current directory was removed, say
        return ""
    return f"; {free:,} bytes are free"


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes all of it or nothing, and waits until it is on the disk."""
    partial = partial_of(path)
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def sync_tree(path: Path) -> None:
    for directory, _, files in os.walk(path):
        for name in files:
            _sync(Path(directory) / name)
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
