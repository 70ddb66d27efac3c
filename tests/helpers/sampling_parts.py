"""Settings of samplers, and what filters should leave, worked out row by row in float64."""

import itertools

import numpy as np

from dspark_jax.decode.sampling import Choice, Sampling

# The border of a filter that a row may be this close to: what float32 makes of it says nothing.
BORDER = 1e-6
VOCABULARY = 257
ROWS_EACH = 24
FILTERS = [
    {name: value for name, value in filters.items() if name in names}
    for filters in (
        {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 40, "top_p": 0.5, "min_p": 0.01},
    )
    for count in (1, 2, 3)
    for names in itertools.combinations(filters, count)
]
# 42 of them, of all filters and combinations at three temperatures: with ROWS_EACH, 1,008 rows.
TEMPERATURES = (0.4, 1.0, 1.7)
SETTINGS = [{"temperature": t, **filters} for t in TEMPERATURES for filters in FILTERS]


def sampling(
    streams: int, *, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=0, prompt=0
) -> Sampling:
    """One value, or one for each stream."""
    values = {
        "temperature": (temperature, np.float32),
        "top_k": (top_k, np.int32),
        "top_p": (top_p, np.float32),
        "min_p": (min_p, np.float32),
        "seed": (seed, np.uint32),
        "prompt": (prompt, np.int32),
    }
    return Sampling(
        **{
            name: np.ascontiguousarray(np.broadcast_to(np.asarray(value, kind), (streams,)))
            for name, (value, kind) in values.items()
        }
    )


def unbiased(sampling: Sampling | None, streams: int, vocabulary: int) -> Choice:
    return Choice(np.zeros((streams, vocabulary), np.float32), sampling)


def filter_cases() -> tuple[np.ndarray, list[dict]]:
    """Random logits [rows, VOCABULARY] and the settings of each row."""
    rows = [settings for settings in SETTINGS for _ in range(ROWS_EACH)]
    rng = np.random.default_rng(11)
    width = rng.uniform(0.5, 4, (len(rows), 1))
    return (rng.standard_normal((len(rows), VOCABULARY)) * width).astype(np.float32), rows


def settings_of(rows: list[dict]) -> Sampling:
    """One stream for each row."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    names = ("temperature", *neutral)
    return sampling(len(rows), **{name: [(neutral | row)[name] for row in rows] for name in names})


def left_by(logits: np.ndarray, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """What the filters leave of logits [V], bool [V], and how close the row is to a border of
    theirs, as a difference of scaled logits or of probabilities.
    """
    scaled = logits.astype(np.float64) / np.float64(np.float32(temperature))
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    odds = np.exp(scaled[order] - scaled[order[0]])
    left, closest = len(order), np.inf
    if 0 < top_k < left:
        closest = scaled[order[top_k - 1]] - scaled[order[top_k]] or np.inf  # equals have no border
        left = top_k
    if top_p < 1:
        before = (np.cumsum(odds[:left]) - odds[:left]) / np.sum(odds[:left])
        top_p = np.float64(np.float32(top_p))
        closest = min(closest, np.min(np.abs(before - top_p)))
        left = int(np.sum(before < top_p))
    if min_p > 0:
        min_p = np.float64(np.float32(min_p))
        closest = min(closest, np.min(np.abs(odds[:left] - min_p)))
        left = int(np.sum(odds[:left] >= min_p))
    kept = np.zeros(len(order), bool)
    kept[order[:left]] = True
    return kept, closest
