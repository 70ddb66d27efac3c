"""The routed experts in NumPy float64: the line that every backend is held against. Slow, and
independent of the backends' code.

`line` can round to bfloat16 where the accelerator kernels do (their inputs and the hidden
activations). A rounding is discontinuous: a value that lies within float32 noise of a rounding
boundary may go either way. `line` therefore also returns, row by row, how far such undecided values
could move the output; it is zero for most rows, and nothing else is tolerated.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from dspark_jax.pallas_kernels import fp4

# Noise of a float32 sum of products, relative to the l2 norm of the products, and of the few
# operations after it.
NOISE = 2e-7


class Line(NamedTuple):
    out: np.ndarray  # [T, D] float64
    slack: np.ndarray  # [T] float64: l2 distance that undecided roundings may add


def _bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def quantise_e4m3(x: np.ndarray, block: int = 128) -> np.ndarray:
    """QA of spec section 3 in float64; a last block may be shorter."""
    out = np.empty_like(x, np.float64)
    for start in range(0, x.shape[-1], block):
        part = x[..., start : start + block].astype(np.float64)
        amax = np.maximum(np.abs(part).max(axis=-1, keepdims=True), 1e-4)
        scale = 2.0 ** np.ceil(np.log2(amax / 448.0))
        out[..., start : start + block] = (
            np.clip(part / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            * scale
        )
    return out


def _hidden(first, inputs, weight, limit):
    """The input [F] of the second GEMM before its rounding, and how far float32 arithmetic may be
    from it.
    """
    gate, up = np.split(first @ inputs, 2)
    gate_norm, up_norm = np.split(np.sqrt(first**2 @ inputs**2), 2)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    sigmoid = 1 / (1 + np.exp(-gate))
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    hidden = weight * gate * sigmoid * up
    return hidden, NOISE * (
        np.abs(weight) * (np.abs(slope * up) * gate_norm + np.abs(gate * sigmoid) * up_norm)
        + np.abs(hidden)
    )


def line(
    x,
    ids,
    weights,
    mask,
    experts,
    *,
    swiglu_limit,
    first_expert=0,
    activation_quant=False,
    round_bf16=False,
) -> Line:
    """Arguments as `moe_fp4`, experts packed. Returns the float64 result and its slack."""
    x, ids, weights, mask = (np.asarray(a) for a in (x, ids, weights, mask))
    w13, s13, w2, s2 = (np.asarray(a) for a in experts)
    round_to = _bf16 if round_bf16 else lambda v: v
    quantise = (lambda v: round_to(quantise_e4m3(v))) if activation_quant else round_to
    rows, width = x.shape
    out, slack = np.zeros((rows, width)), np.zeros(rows)
    cache = {}
    for t in np.flatnonzero(mask):
        inputs = quantise(x[t].astype(np.float64))
        for expert, weight in zip(ids[t] - first_expert, weights[t].astype(np.float64)):
            if not 0 <= expert < w2.shape[0]:
                continue
            if expert not in cache:
                cache[expert] = (
                    fp4.np_dequantise(w13[expert], s13[expert], np.float64),
                    fp4.np_dequantise(w2[expert], s2[expert], np.float64),
                )
            first, second = cache[expert]
            hidden, noise = _hidden(first, inputs, weight, swiglu_limit)
            out[t] += second @ quantise(hidden)
            undecided = quantise(hidden + noise) - quantise(hidden - noise)
            if activation_quant or round_bf16:
                slack[t] += np.linalg.norm(
                    second * np.where(np.abs(undecided) > 4 * noise, undecided, 0)
                )
    return Line(out, slack)


def error(y, truth: Line, mask=None) -> float:
    """Relative l2 distance of y [T, D] from the line over the rows that count, after deducting the
    slack row by row.
    """
    mask = np.ones(len(truth.out), bool) if mask is None else np.asarray(mask)
    distance = np.linalg.norm(np.asarray(y, np.float64)[mask] - truth.out[mask], axis=1)
    return float(
        np.linalg.norm(np.maximum(distance - truth.slack[mask], 0))
        / np.linalg.norm(truth.out[mask])
    )
