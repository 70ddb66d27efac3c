"""Reads a checkpoint's config.json."""

import json
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints.errors import ConfigError
from dspark_jax.checkpoints.paths import OWN_FILES, expanded, no_file, what_else_at


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in config.json at `path` (the file or its directory). A key given twice is
    refused. A pipe is read where it was named itself, as the shell's <(...) does.

    Raises ConfigError.
    """
    path = expanded(path)
    try:
        path = path / "config.json" if path.is_dir() else path
        if (other := no_file(path, pipe=path.name not in OWN_FILES)) is not None:
            raise ConfigError(f"this is {other}")
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_pairs)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; a checkpoint directory holds a config.json"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        if (other := what_else_at(path)) is not None:
            raise ConfigError(f"{path}: this is {other}") from None
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"key given twice: {', '.join(twice)}")
    return dict(pairs)
