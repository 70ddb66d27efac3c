"""What a checkpoint's path may be: one rule for everything that reads one."""

import errno
import os
import reprlib
import stat
from pathlib import Path

from dspark_jax.checkpoints.errors import CheckpointError, ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files that stand for the directory they lie in.
OWN_FILES = (SINGLE, INDEX, "config.json", "tokenizer.json", "manifest.json", "conversion.json")


# What may stand where a file is expected.
_OTHERS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def expanded(path: str | os.PathLike) -> Path:
    """`path` with a leading "~" or "~name" replaced by that home, where there is such a user.

    Raises ConfigError for what is no path: another type, nothing at all, a NUL character.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ConfigError(f"a path is expected, a str or a pathlib.Path; got {reprlib.repr(path)}")
    if text == "":
        raise ConfigError('a path is empty; name a file or a directory ("." is the present one)')
    if "\0" in text:
        raise ConfigError(f"{text!r}: a path cannot hold a NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user, or no home: then it is a name like any other
        return Path(text)


def no_file(path: Path, pipe: bool = False) -> str | None:
    """What stands at `path` that is no file; None for a file and for nothing at all. To be asked
    before it is opened: reading a pipe waits for a writer, and some devices have no end.

    pipe: one is as good as a file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link to what does not exist" if path.is_symlink() else None
    except OSError:
        return None  # opening it says why
    if pipe and stat.S_ISFIFO(mode):
        return None
    return next((f"{what}, not a file" for is_kind, what in _OTHERS if is_kind(mode)), None)


def checkpoint_directory(path: str | Path) -> Path:
    """The directory of the checkpoint at `path`: that directory, or one of a checkpoint's own files
    in it. "~" is the user's home.

    Raises CheckpointError for what does not exist or may not be read, and for any other file, since
    it would be read without what belongs to it; ConfigError for what is no path.
    """
    path = expanded(path)
    try:
        directory = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: no such checkpoint directory") from None
    except OSError as error:
        raise CheckpointError(f"{_short(path)}: cannot be read: {error.strerror}") from None
    if directory and not os.access(path, os.X_OK):
        raise CheckpointError(f"{path}: cannot be read: {os.strerror(errno.EACCES)}")
    if directory:
        return path
    if path.name in OWN_FILES:
        return path.parent
    raise CheckpointError(
        f"{path}: a file, where a checkpoint directory is expected (config.json with {SINGLE}, or "
        f"{INDEX} and its shards); give {path.parent}"
    )


def _short(path: Path) -> str:
    """For an error that may be about a name's length."""
    text = str(path)
    return text if len(text) < 200 else f"{text[:100]}... ({len(text)} characters)"


def what_else(first: bytes) -> str | None:
    """What a file is that begins with these bytes and is not what it should be; None: unknown."""
    text = first.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "a web page, not the file itself: the download was answered with an error page"
    if first.startswith(b"PK\x03\x04"):
        return "a zip archive, such as PyTorch saves; it must be converted to safetensors"
    if not first:
        return "empty: the download or copy did not begin"
    return None


def what_else_at(path: Path) -> str | None:
    """`what_else` of the file at `path`; None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return what_else(file.read(64))
    except OSError:
        return None
