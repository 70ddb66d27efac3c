"""One safetensors file: its header read and checked at once, its tensors mapped and read by slices.

The safetensors package reads whole files, and neither its NumPy nor its slice path knows bfloat16
and the 8-bit float formats. The format is simple: 8 bytes of header length (little endian), a JSON
header {name: {dtype, shape, data_offsets}}, the data.
"""

import dataclasses
import json
import math
import mmap
import struct
from pathlib import Path

import numpy as np

from dspark_jax.checkpoints.errors import CheckpointError
from dspark_jax.checkpoints.paths import no_file, what_else

# Bits of every dtype a header may carry; `official` decides which of them a tensor may have.
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
MAX_HEADER = 100_000_000  # bytes; the format's own limit
FAULT_AROUND = 1 << 16  # bytes that Linux maps around a page that is touched


@dataclasses.dataclass(frozen=True)
class Entry:
    """One stored tensor of a file: its dtype as the header spells it, its shape and its bytes
    [start, stop) in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """`entries` by tensor name and `problems`, found from the header and the file's size alone; the
    file is mapped when read.
    """

    def __init__(self, path: Path):
        self.path, self.entries, self.problems = path, {}, []
        self._map, self._size = None, 0
        try:
            self._read_header()
        except OSError as error:
            self._note(f"cannot be read: {error.strerror}")

    def read(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Bytes of tensor `name`, seen as [shape[0], bytes of the rest]: a copy uint8 [rows,
        columns], columns counted in bytes.

        Only the pages that hold these bytes are read, and they are given back to the system after
        the copy.
        """
        entry = self.entries[name]
        if self._map is None:
            self._map = self._mapped()
        height = entry.shape[0] if entry.shape else 1
        view = np.frombuffer(self._map, np.uint8, entry.nbytes, entry.start).reshape(height, -1)
        copy = view[rows, columns].copy()
        self._give_back(
            entry.start + rows.start * view.shape[1], entry.start + rows.stop * view.shape[1]
        )
        return copy

    def close(self) -> None:
        """Unmaps the file; reading maps it again."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _mapped(self) -> mmap.mmap:
        """Raises CheckpointError where the file is gone or has another size than when it was
        opened. (Reading past a file's end would end the process.)
        """
        try:
            with open(self.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise CheckpointError(f"{self.path}: cannot be read any more: {error}") from error
        if len(mapped) != self._size:
            raise CheckpointError(
                f"{self.path}: has {len(mapped)} bytes and had {self._size} when it was opened; "
                "wait until nothing writes to it, and load it again"
            )
        return mapped

    def _give_back(self, start: int, stop: int) -> None:
        """Mapped pages count as this process's memory until they are dropped; they stay in the
        system's file cache.
        """
        start, stop = max(0, start - FAULT_AROUND), min(len(self._map), stop + FAULT_AROUND)
        start -= start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _note(self, text: str) -> None:
        self.problems.append(f"{self.path.name}: {text}")

    def _read_header(self) -> None:
        if (other := no_file(self.path)) is not None:
            return self._note(f"this is {other}")
        size = self._size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            first = file.read(64)
            file.seek(0)
            if (other := what_else(first)) is not None:
                return self._note(f"this is {other}")
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or 8 + length > size:
                return self._note(
                    f"the file of {size} bytes ends before its header does: it is truncated, "
                    "copy it again"
                )
            if length > MAX_HEADER:
                return self._note(f"header of {length} bytes: this is not a safetensors file")
            text = file.read(length)
        try:
            header = json.loads(text, object_pairs_hook=self._pairs)
        except (ValueError, RecursionError) as error:
            return self._note(
                f"the header is not JSON ({error}): the file is damaged or not a safetensors file"
            )
        if not isinstance(header, dict):
            return self._note("the header is not a JSON object: this is not a safetensors file")
        header.pop("__metadata__", None)
        for name, described in header.items():
            self._add(name, described, 8 + length)
        self._check_layout(8 + length, size)

    def _pairs(self, pairs: list) -> dict:
        out = {}
        for name, value in pairs:
            if name in out:
                self._note(f"{name}: in the header twice")
            out[name] = value
        return out

    def _add(self, name: str, described: dict, data: int) -> None:
        """Takes one header entry over into `entries`. data: the file offset where tensor bytes
        begin.
        """
        try:
            dtype, shape, (start, stop) = (
                described["dtype"],
                tuple(described["shape"]),
                described["data_offsets"],
            )
            bits = math.prod(shape) * BITS[dtype]
            sound = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        except (KeyError, TypeError, ValueError):
            return self._note(f"{name}: header entry {described!r} is not understood")
        if not sound or stop < start or (stop - start) * 8 != bits:
            return self._note(
                f"{name}: {dtype} {list(shape)} does not fit its bytes [{start}, {stop})"
            )
        self.entries[name] = Entry(dtype, shape, data + start, data + stop)

    def _check_layout(self, data: int, size: int) -> None:
        """The tensors must fill the file exactly, one after another. A file that ends early is
        named as such.
        """
        end = data
        for name, entry in sorted(
            self.entries.items(), key=lambda item: (item[1].start, item[1].stop)
        ):
            if entry.start != end and not self.problems:
                self._note(
                    f"{name}: begins at byte {entry.start}, the tensor before it ends at {end}: "
                    "the header is damaged"
                )
            end = max(end, entry.stop)
        if end > size:
            self._note(
                f"the file has {size} bytes, its header describes {end}: it is truncated, copy "
                "it again"
            )
        elif end < size and not self.problems:
            self._note(f"the file has {size} bytes, its header describes only {end}: it is damaged")
