"""Small checkpoint directories for the tests, and ways to damage them."""

import json
import math
import struct
from pathlib import Path

import numpy as np

from dspark_jax.checkpoints.official import INDEX, SINGLE
from dspark_jax.checkpoints.safetensors_file import BITS, SafetensorsFile
from dspark_jax.checkpoints.tensor_spec import TensorSpec
from dspark_jax.checkpoints.writer import write_official
from dspark_jax.config import ModelConfig

from helpers import official_table

GOLDENS = Path(__file__).parents[1] / "goldens"
CONFIG = ModelConfig.from_file(GOLDENS)
SPECS = official_table.expected(CONFIG)
SMALL = [
    TensorSpec("embed.weight", (6, 10), "bf16"),
    TensorSpec("layers.0.w", (200, 300), "fp8"),
    TensorSpec("e", (7, 96), "fp4"),
    TensorSpec("ids", (5, 2), "i64", 8),
    TensorSpec("base", (3,), "f32"),
]


def values_for(spec, seed=0):
    rng = np.random.default_rng(seed)
    if spec.storage == "i64":
        return rng.integers(0, spec.limit, spec.shape)
    return rng.standard_normal(spec.shape).astype(np.float32) * np.float32(0.3)


def write_small(directory, specs=SMALL, **options):
    write_official(
        directory, CONFIG.to_dict(), [(spec, values_for(spec)) for spec in specs], **options
    )
    return directory


def edit_header(path, change):
    """Rewrites the header of the file at `path` (padded to the old length if it got shorter) after
    `change(header)`.
    """
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header = change(header) or header
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def poison(directory, name, index, byte):
    """Overwrites one byte of a stored 8-bit tensor."""
    file = SafetensorsFile(directory / SINGLE)
    entry = file.entries[name]
    with open(directory / SINGLE, "r+b") as out:
        out.seek(entry.start + index[0] * entry.shape[1] + index[1])
        out.write(bytes([byte]))


def hollow_checkpoint(directory, config, shards):
    """An official checkpoint of any size with sound headers and no data: its files are sparse and
    take no room.
    """
    stored = [item for spec in official_table.expected(config) for item in spec.stored().items()]
    size, weight_map = -(-len(stored) // shards), {}
    for i in range(shards):
        name, header, end = f"model-{i + 1:05d}-of-{shards:05d}.safetensors", {}, 0
        for tensor, (dtypes, shape) in stored[i * size : (i + 1) * size]:
            stop = end + math.prod(shape) * BITS[dtypes[0]] // 8
            header[tensor] = {"dtype": dtypes[0], "shape": shape, "data_offsets": [end, stop]}
            weight_map[tensor], end = name, stop
        text = json.dumps(header).encode()
        with open(directory / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    return directory
