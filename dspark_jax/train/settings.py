"""What a run was begun with, beside its state: it is continued with the same, or not at all."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dspark_jax.errors import ConfigError
from dspark_jax.runtime import files

NAME = "settings.json"


def keep(run: Path, settings: dict[str, Any], free: Collection[str] = ()) -> bool:
    """Writes the settings of a run that begins; -> whether it had begun before.

    settings: what the results depend on, by the name that an error is to have for it. free: names
    of those that nothing depends on yet, which are written anew. Raises ConfigError that lists all
    others that differ from those that the run was begun with.
    """
    path, settings = run / NAME, json.loads(json.dumps(settings))
    begun = path.exists()
    if begun:
        _require_equal(path, settings, free)
    if not begun or free:
        run.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(settings, indent=1) + "\n")
    return begun


def _require_equal(path: Path, settings: dict[str, Any], free: Collection[str]) -> None:
    try:
        before = json.loads(path.read_text("utf-8"))
        differing = [
            f"{name}: {_shown(before.get(name))}, now {_shown(settings.get(name))}"
            for name in dict.fromkeys([*before, *settings])
            if before.get(name) != settings.get(name) and name not in free
        ]
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: not readable ({error}); give another --run") from None
    if differing:
        raise ConfigError(
            "\n  ".join(
                [
                    f"{path.parent}: this training was begun with other settings; ask for those "
                    "again, or give another --run:",
                    *differing,
                ]
            )
        )


def _shown(value) -> str:
    return "not given" if value is None else json.dumps(value)
