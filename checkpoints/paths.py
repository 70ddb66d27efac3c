"""What a checkpoint's path may be: one rule for everything that reads one."""

from pathlib import Path

from dspark_jax.checkpoints.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files that stand for the directory they lie in.
OWN_FILES = (SINGLE, INDEX, "config.json", "tokenizer.json", "manifest.json", "conversion.json")


def expanded(path: str | Path) -> Path:
    """`path` with a leading "~" or "~name" replaced by that home, where there is such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or no home: then it is a name like any other
        return Path(path)


def checkpoint_directory(path: str | Path) -> Path:
    """The directory of the checkpoint at `path`: that directory, or one of a checkpoint's own files
    in it. "~" is the user's home.

    Raises CheckpointError for what does not exist and for any other file, since it would be read
    without what belongs to it.
    """
    path = expanded(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint directory")
    if path.is_dir():
        return path
    if path.name in OWN_FILES:
        return path.parent
    raise CheckpointError(
        f"{path}: a file, where a checkpoint directory is expected (config.json with {SINGLE}, or "
        f"{INDEX} and its shards); give {path.parent}"
    )


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
