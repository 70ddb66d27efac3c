"""The official storage formats in plain numpy, written from the specification and independent of
the library.

The parity tests need a second opinion on the bytes: weights are *snapped* here to values the
official storage can hold, written by the library's writer, and read back by `read_official`, which
shares no code with the library's reader.

Formats (spec sections 2 and 3): `bf16`, `f32`, `i64`; `fp8` = e4m3 with one power-of-two scale per
128x128 block; `fp4` = e2m1, two a byte, low nibble first, with one power-of-two scale per 32
columns. Scales are e8m0 bytes: b means 2**(b-127).
"""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MIDPOINTS = (E2M1[1:] + E2M1[:-1]) / 2
_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": np.uint8,
    "I8": np.uint8,
    "U8": np.uint8,
}


def snap(values, storage):
    """The nearest values that `storage` holds exactly; same shape, float32 (int64 for "i64")."""
    if storage == "i64":
        return np.asarray(values, np.int64)
    values = np.asarray(values, np.float32)
    if storage == "f32":
        return values
    if storage == "bf16":
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)
    if storage == "fp8":
        return _scaled(
            values,
            (128, 128),
            448.0,
            lambda x: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
        )
    if storage == "fp4":
        return _scaled(values, (1, 32), 6.0, _round_e2m1)
    raise ValueError(f"unknown storage {storage!r}")


def _scaled(values, block, largest, rounding):
    """Rounds every block in units of its own power of two, the smallest that brings the block into
    +-largest.
    """
    rows, columns = values.shape
    padded = np.pad(values, [(0, -rows % block[0]), (0, -columns % block[1])])
    blocks = padded.reshape(padded.shape[0] // block[0], block[0], -1, block[1])
    peak = np.abs(blocks).max((1, 3), keepdims=True)
    scale = np.exp2(np.ceil(np.log2(np.where(peak > 0, peak, largest) / largest))).astype(
        np.float32
    )
    rounded = rounding(np.clip(blocks / scale, -largest, largest)) * scale
    return rounded.reshape(padded.shape)[:rows, :columns]


def _round_e2m1(x):
    """Nearest e2m1 value; a tie goes to the even code, so the midpoints above the odd codes 1, 3
    and 5 round up.
    """
    size = np.abs(x)
    code = (size[..., None] > MIDPOINTS).sum(-1) + np.isin(size, MIDPOINTS[1::2])
    return np.copysign(E2M1[code], x)


def read_official(folder):
    """Every logical tensor of an official checkpoint folder as {table name: float32 or int64
    array}.

    Reads `model*.safetensors` (one file or shards) byte by byte; `name.weight` + `name.scale`
    becomes `name`, dequantised.
    """
    raw = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        raw.update(_read_file(path))
    tensors = {}
    for name, value in raw.items():
        stem = name.removesuffix(".weight")
        if name.endswith(".scale"):
            continue
        if stem + ".scale" in raw:
            tensors[stem] = _dequantise(value, raw[stem + ".scale"])
        else:
            tensors[name] = value if value.dtype == np.int64 else value.astype(np.float32)
    return tensors


def _read_file(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], _DTYPES[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


def _dequantise(weight, scale):
    scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
    if weight.dtype == np.uint8:
        codes = np.stack([weight & 15, weight >> 4], -1).reshape(weight.shape[0], -1)
        return np.where(codes & 8, -1, 1) * E2M1[codes & 7] * np.repeat(scale, 32, 1)
    grid = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: weight.shape[0], : weight.shape[1]]
    return weight.astype(np.float32) * grid
