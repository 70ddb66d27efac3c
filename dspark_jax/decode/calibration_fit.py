"""How scores of the drafter become probabilities that mean what they say: one temperature and one
offset a draft position, fitted from left to right.

A score s_k, a raw logit, says how likely draft k is right, given that those before it were. What a
round is worth depends on the product, the probability that all of the first k drafts are accepted:

    q_k = sigmoid(s_k / T_k + o_k)          P_k = q_1 * ... * q_k

T_1 is the temperature at which P_1 is calibrated best, then T_2 that at which P_2 is, with position
1 as it was found, and so on: sequential temperature scaling. Each is found by a search in one
dimension. For every T that is tried the offset is the one at which P_k is right on average; without
it a score of 0 would say one half at every temperature, and a drafter that is too sure of itself
everywhere could not be corrected.

Calibrated best is: with the least expected calibration error (ECE). For the search its bins are of
equal counts, in the order of the scores: bins that no temperature moves. In bins of equal width a
high temperature puts all predictions into one, where errors of both signs cancel, and a drafter
that says nothing any more would look perfect. What is reported are bins of equal width.

Every round whose whole block was verified says of every k whether its first k drafts were accepted,
so nothing is censored in P_k. Of a draft by itself a round says something only where those before
it were accepted.

Plain NumPy in float64. N: rounds, K: draft block. scores: [N, K]. accepted: [N] int, 0..K, leading
drafts that were accepted.
"""

from __future__ import annotations

import itertools

import numpy as np

from dspark_jax.loading.calibration import Scale

BINS = 15  # of either ECE
LOWEST, HIGHEST = 0.1, 20.0  # temperatures that are searched
FARTHEST = 16.0  # logits; offsets that are searched
_COARSE, _FINE = 41, 21  # steps of the search; the second lies about the best of the first


def right(scores: np.ndarray, scale: Scale) -> np.ndarray:
    """q: how likely each draft is right, given those before it, [N, K] in 0..1."""
    return _sigmoid(scores / np.array(scale.temperatures) + np.array(scale.offsets))


def all_right(scores: np.ndarray, scale: Scale) -> np.ndarray:
    """P, [N, K] in 0..1."""
    return np.cumprod(right(scores, scale), axis=1)


def happened(accepted: np.ndarray, block: int) -> np.ndarray:
    """Whether all of the first k drafts were accepted, bool [N, K]."""
    return accepted[:, None] > np.arange(block)


def fit(scores: np.ndarray, accepted: np.ndarray, offsets: bool = True) -> Scale:
    """The scale of rounds that verified the whole block. offsets: False: temperatures alone.

    A position keeps its raw scores where every draft whose fate was seen was accepted, or none was:
    such rounds do not say how fast the chance falls with the score.
    """
    outcome = happened(accepted, scores.shape[1])
    before, found = np.ones(len(scores)), []
    for k in range(scores.shape[1]):
        fate = outcome[accepted >= k, k]
        one = _Position(scores[:, k], before, outcome[:, k], offsets)
        best = (1.0, 0.0) if fate.all() or not fate.any() else one.best()
        before = before * _sigmoid(scores[:, k] / best[0] + best[1])
        found.append(best)
    return Scale(*(tuple(map(float, column)) for column in zip(*found)))


class _Position:
    """The search at one position. before: [N], the product of the positions to its left."""

    def __init__(self, scores: np.ndarray, before: np.ndarray, outcome: np.ndarray, offsets: bool):
        self.scores, self.before, self.outcome, self.offsets = scores, before, outcome, offsets
        rank = np.empty(len(scores), int)
        rank[np.argsort(scores, kind="stable")] = np.arange(len(scores))
        self.bins = rank * BINS // len(scores)

    def best(self) -> tuple[float, float]:
        """The temperature and its offset: over a grid of equal ratios, then over a finer one about
        the best of it.
        """
        grid = np.linspace(np.log(LOWEST), np.log(HIGHEST), _COARSE)
        coarse, step = min(grid, key=self._cost), grid[1] - grid[0]
        fine = coarse + step * np.linspace(-1, 1, _FINE)
        found = min(np.clip(fine, grid[0], grid[-1]), key=self._cost)
        temperature = float(np.exp(found))
        return temperature, self._offset(temperature)

    def _cost(self, logarithm: float) -> float:
        temperature = np.exp(logarithm)
        predicted = self._predicted(temperature, self._offset(temperature))
        return np.abs(np.bincount(self.bins, predicted - self.outcome)).sum()

    def _predicted(self, temperature: float, offset: float) -> np.ndarray:
        return self.before * _sigmoid(self.scores / temperature + offset)

    def _offset(self, temperature: float) -> float:
        """The one at which the mean prediction is the share that happened, by bisection."""
        if not self.offsets:
            return 0.0
        low, high = -FARTHEST, FARTHEST
        for _ in range(28):
            middle = (low + high) / 2
            too_low = self._predicted(temperature, middle).mean() < self.outcome.mean()
            low, high = (middle, high) if too_low else (low, middle)
        return (low + high) / 2


def calibration_error(predicted: np.ndarray, outcome: np.ndarray) -> float:
    """The ECE of predictions in 0..1, an array of any shape, of what happened or not: in each of
    `BINS` bins of equal width the distance of the mean prediction from the share that happened,
    weighted by how many predictions lie in it.
    """
    predicted, outcome = predicted.ravel(), outcome.ravel()
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, predicted - outcome)).sum() / len(predicted))


def errors(scores: np.ndarray, accepted: np.ndarray, scale: Scale) -> dict:
    """The ECE of P: `all`, of every round and every k together, and `by_position`, [K]."""
    block = scores.shape[1]
    predicted, outcome = all_right(scores, scale), happened(accepted, block)
    by_position = [calibration_error(predicted[:, k], outcome[:, k]) for k in range(block)]
    return {"all": calibration_error(predicted, outcome), "by_position": by_position}


def reliability(scores: np.ndarray, accepted: np.ndarray, scale: Scale, edges) -> dict:
    """What was predicted and what was observed, in buckets between the inner `edges` (logits; a
    bucket holds its lower one).

    `products`: of P, every round and every k. `drafts`: of q, every draft whose fate was seen. Each
    is a list of {"predicted": mean, "observed": share, "count": n}, both None where n is 0.
    """
    outcome = happened(accepted, scores.shape[1])
    seen = np.arange(scores.shape[1]) <= accepted[:, None]
    limits = _sigmoid(np.array(edges, np.float64))
    return {
        "products": _buckets(all_right(scores, scale).ravel(), outcome.ravel(), limits),
        "drafts": _buckets(right(scores, scale)[seen], outcome[seen], limits),
    }


def _buckets(predicted: np.ndarray, outcome: np.ndarray, limits: np.ndarray) -> list[dict]:
    bucket, rows = np.digitize(predicted, limits), []
    for i in range(len(limits) + 1):
        inside, count = bucket == i, int(np.sum(bucket == i))
        mean = float(predicted[inside].mean()) if count else None
        share = float(outcome[inside].mean()) if count else None
        rows.append({"predicted": mean, "observed": share, "count": count})
    return rows


def rises(buckets: list[dict]) -> bool:
    """Whether the observed share never falls from a bucket to the next; empty ones say nothing."""
    observed = [row["observed"] for row in buckets if row["count"]]
    return all(a <= b for a, b in itertools.pairwise(observed))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    """By tanh, which neither overflows nor takes long."""
    return 0.5 + 0.5 * np.tanh(0.5 * logits)
