"""Files that are written for the user: whole or not at all, where the user said."""

import contextlib
import errno
import os
from pathlib import Path

from dspark_jax.checkpoints.paths import expanded


def real_path(path: str | Path) -> Path:
    """Where a file would be written: "~" and links are followed, but for those that the kernel
    alone can follow, as /dev/stdout where it is a pipe.
    """
    path = expanded(path)
    target = Path(os.path.realpath(path))
    return path if os.path.exists(path) and not os.path.exists(target) else target


def check_writable(path: str | Path) -> None:
    """Raises OSError where `write_text` would, for another reason than a disk that is full."""
    path = real_path(path)
    if path.exists() and not path.is_file():
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    unfinished = _unfinished(path)
    with naming(path):
        unfinished.touch()
        unfinished.unlink()


def _unfinished(path: Path) -> Path:
    return path.with_name(f".dspark-{os.getpid()}.partial")  # short: names have an end


def write_text(path: str | Path, text: str) -> None:
    """`write_bytes` of the text in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes `content` to `path`. Raises OSError; what stood there before is then untouched.

    A link is followed, so that what it points to is replaced and not the link. What is not a
    regular file, such as a pipe or /dev/stdout, is written to directly.
    """
    path = real_path(path)
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            file.write(content)
        return
    unfinished = _unfinished(path)
    try:
        with naming(path):
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: Path):
    """An OSError within is one of this path, whatever file beside it was being written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
