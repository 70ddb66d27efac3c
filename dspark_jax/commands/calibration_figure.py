"""The figure of `dspark calibrate`: in each of the gate's buckets, what was predicted against what
was observed, before and after. Drawn with matplotlib, which the extra `figures` installs.
"""

from __future__ import annotations

import importlib.util
from pathlib import PurePath

from dspark_jax.errors import ConfigError

ENDINGS = (".png", ".svg", ".pdf")


def check(path: str) -> None:
    """Raises ConfigError where no figure could be drawn or written there."""
    from dspark_jax.commands.asking import check_file

    if PurePath(path).suffix.lower() not in ENDINGS:
        raise ConfigError(f"--figure {path}: its name must end in {', '.join(ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--figure needs matplotlib, which is not installed; pip install 'dspark-jax[figures]'"
        )
    check_file("--figure", path)


def draw(path: str, judged: dict) -> None:
    """judged: "greedy" and "sampled", each what decode.calibrate.judge returned."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(judged), sharey=True)
    for panel, (kind, found) in zip(panels, judged.items()):
        _draw_kind(panel, kind, found)
    panels[0].set_ylabel("observed")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--figure {path}: cannot be written ({error.strerror})") from None


def _draw_kind(panel, kind: str, found: dict) -> None:
    panel.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
    series = (
        ("raw", found["reliability_raw"], found["ece_raw"], "tab:orange", "s"),
        ("scaled", found["reliability"], found["ece"], "tab:blue", "o"),
    )
    for name, reliability, error, colour, marker in series:
        rows = [row for row in reliability["products"] if row["count"]]
        predicted, observed = ([row[key] for row in rows] for key in ("predicted", "observed"))
        label = f"{name}, ECE {100 * error['all']:.1f}%"
        panel.plot(predicted, observed, color=colour, marker=marker, label=label)
    panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted", aspect="equal")
    panel.set_title(f"first k drafts accepted, {kind}")
    panel.legend(loc="upper left")
