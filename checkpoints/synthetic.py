"""Random official checkpoints of any size, for tests and demonstrations: well scaled, so that a
model made of one runs without overflow, and written shard by shard with a bounded amount of memory.

A tensor's values depend on the seed and its name alone, not on the shards. All are normal deviates,
drawn by table: a random byte or 16-bit number picks a quantile, already in the format of the
tensor. Matrices have about variance 1 / columns, the embedding 1.
"""

import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.checkpoints import formats
from dspark_jax.checkpoints.tensor_spec import TensorSpec, hyper_connection_base
from dspark_jax.checkpoints.writer import write_official

BLOCK_BYTES = 32 << 20  # random numbers drawn at a time; the working memory is a few times this
ROWS = formats.FP8_BLOCK  # blocks of rows are whole quantisation blocks
# Of the codes before their scale; the largest quantile stays inside either format.
E4M3_RMS, E2M1_RMS = 64.0, 2.0


def write_synthetic(
    directory: str | Path,
    config_dict: dict[str, Any],
    specs: Iterable[TensorSpec],
    seed: int = 0,
    max_shard_bytes: int | None = 4_000_000_000,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes a checkpoint of random tensors. Arguments as of `write_official`; `specs` is what a
    model of this config expects.

    Integer tensors are hash tables [V, A]: A different experts a token, below the config's
    n_routed_experts.
    """
    tables = _tables()
    experts = config_dict.get("n_routed_experts")
    items = [(spec, lambda spec=spec: _values(spec, seed, tables, experts)) for spec in specs]
    write_official(directory, config_dict, items, max_shard_bytes, tokenizer, progress)


def _tables() -> dict[str, np.ndarray]:
    """Standard normal quantiles: "normal" float32 for 16 random bits, "fp8" codes for 16 bits,
    "fp4" codes for 8 bits.
    """
    inverse = statistics.NormalDist().inv_cdf
    normal = np.array([inverse((i + 0.5) / 65536) for i in range(65536)], np.float32)
    coarse = np.array([inverse((i + 0.5) / 256) for i in range(256)], np.float32)
    fp8 = (normal * np.float32(E4M3_RMS)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    nearest = np.abs(np.abs(coarse * E2M1_RMS)[:, None] - formats.E2M1[:8]).argmin(axis=1)
    return {"normal": normal, "fp8": fp8, "fp4": (nearest + 8 * (coarse < 0)).astype(np.uint8)}


def _values(spec: TensorSpec, seed: int, tables: dict[str, np.ndarray], experts: int | None) -> Any:
    """What `write_official` takes: the array of a small or structured tensor, or an iterator over
    blocks of rows.
    """
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    last = spec.name.rsplit(".", 1)[-1]
    if spec.storage == "i64":
        return _hash_table(rng, spec.shape, experts)
    if spec.storage in ("fp8", "fp4"):
        return _quantised(spec, rng, tables)
    if spec.name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * tables["normal"][rng.integers(0, 65536, spec.shape, np.uint16)]
    if last.endswith("_base"):
        return hyper_connection_base(spec.shape[0])
    if last.endswith("_scale"):
        return np.ones(spec.shape, np.float32)
    std = {"embed.weight": 1.0, "bias": 0.1, "attn_sink": 1.0}.get(
        spec.name if spec.name == "embed.weight" else last
    )
    return _floats(
        spec, rng, tables["normal"], 1 / math.sqrt(spec.shape[-1]) if std is None else std
    )


def _floats(
    spec: TensorSpec, rng: np.random.Generator, table: np.ndarray, std: float
) -> Iterator[np.ndarray]:
    for rows in _blocks(spec.shape[0], 2 * math.prod(spec.shape[1:])):
        draws = rng.integers(0, 65536, (rows, *spec.shape[1:]), np.uint16)
        yield table[draws] * np.float32(std)


def _quantised(
    spec: TensorSpec, rng: np.random.Generator, tables: dict[str, np.ndarray]
) -> Iterator[tuple]:
    """Blocks of (codes, scales). Scales are one of two neighbouring powers of two, so that a
    misplaced scale shows.
    """
    columns = spec.shape[1]
    rms = E4M3_RMS if spec.storage == "fp8" else E2M1_RMS
    # Of the smaller scale; the other is twice it.
    exponent = round(-math.log2(rms * math.sqrt(columns) * math.sqrt((1 + 4) / 2)))
    for rows in _blocks(spec.shape[0], 2 * columns):
        if spec.storage == "fp8":
            codes = tables["fp8"][rng.integers(0, 65536, (rows, columns), np.uint16)]
            grid = (-(-rows // formats.FP8_BLOCK), -(-columns // formats.FP8_BLOCK))
        else:
            pairs = tables["fp4"][rng.integers(0, 256, (rows, columns), np.uint8)]
            codes = pairs[:, 0::2] | pairs[:, 1::2] << 4
            grid = (rows, columns // formats.FP4_BLOCK)
        yield codes, (rng.integers(0, 2, grid) + (exponent + 127)).astype(np.uint8)


def _hash_table(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> np.ndarray:
    """[V, A]: a run of A neighbouring experts from a random first one, so that every expert gets
    its share.
    """
    return (rng.integers(0, experts, (shape[0], 1)) + np.arange(shape[1])) % experts


def _blocks(rows: int, row_bytes: int) -> Iterator[int]:
    """Row counts that add up to `rows`, each a multiple of 128 rows but the last, of about
    BLOCK_BYTES.
    """
    step = max(ROWS, BLOCK_BYTES // row_bytes // ROWS * ROWS)
    for start in range(0, rows, step):
        yield min(step, rows - start)
