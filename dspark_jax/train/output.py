"""Where a finished checkpoint goes: from the run's folder to the one that was asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

from dspark_jax.checkpoints.paths import INDEX, SINGLE
from dspark_jax.errors import CheckpointError


def move(folder: Path, out: Path) -> None:
    """Moves the files of `folder` to `out`, which is new or empty, onto another disk too. What
    makes it a checkpoint comes last. Raises CheckpointError where that cannot be done.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name in (SINGLE, INDEX)):
            shutil.move(path, out / path.name)
        folder.rmdir()
    except OSError as error:
        raise CheckpointError(
            f"{out}: cannot be written ({error.strerror or error}); the checkpoint is in {folder}"
        ) from error
