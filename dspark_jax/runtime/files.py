"""Files that are written for the user: whole or not at all, where the user said."""

import os
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """Writes `text` to `path`. Raises OSError; what stood there before is then untouched.

    A link is followed, so that what it points to is replaced and not the link. What is not a
    regular file, such as a pipe or /dev/stdout, is written to directly.
    """
    path = Path(os.path.realpath(Path(path).expanduser()))
    if path.exists() and not path.is_file():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
