"""Results of `dspark generate --prompts`: one object a line, in the order of the prompts, each as
soon as it and all before it are there.

A run that was ended leaves leading results, after Ctrl-C perhaps some after a gap, and after a
crash perhaps a torn last line. --resume keeps what is whole and was computed for the same prompt
and settings, by the same model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from dspark_jax.errors import ConfigError
from dspark_jax.runtime import files
from dspark_jax.runtime.interrupts import deferred_interrupts

COMPLETE = ("length", "stop")
BEGINNING = b'{"line": '


class Kept(NamedTuple):
    """A result that a file holds. text: its line, without the break. model: what computed it."""

    text: str
    model: str


def read(path: str, keys: dict[int, str]) -> dict[int, Kept]:
    """The complete results of a file, by the numbers of their lines; none where there is no file.
    A last line that is torn, and what ended with an error, is left out: it is to be computed again.

    keys: of every line of the prompts, what its result must have been computed for.
    Raises ConfigError for a file of anything else.
    """
    target = files.real_path(path)
    if not target.exists():
        return {}
    if not target.is_file():
        raise ConfigError(f"--output {path}: only a file can be resumed")
    try:
        lines = target.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be read ({error.strerror})") from None
    kept: dict[int, Kept] = {}
    for at, line in enumerate(lines, 1):
        where, result = f"--output {path}, line {at}", _result(line)
        if result is None:
            if at == len(lines) and _is_torn(line):
                continue
            raise ConfigError(f"{where}: not a result of --prompts; name another file")
        _require_same(where, result, keys)
        if result["finish_reason"] in COMPLETE:
            kept[result["line"]] = Kept(line.decode(), result["model"])
    return kept


def _is_torn(line: bytes) -> bool:
    """Whether it is the beginning of a result, or nothing, as after the last line break."""
    return line.startswith(BEGINNING) or BEGINNING.startswith(line)


def _result(line: bytes) -> dict | None:
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None
    wanted = {"line": int, "finish_reason": str, "key": str, "model": str}
    if not isinstance(result, dict):
        return None
    return result if all(type(result.get(n)) is kind for n, kind in wanted.items()) else None


def _require_same(where: str, result: dict, keys: dict[int, str]) -> None:
    number = result["line"]
    if number not in keys:
        raise ConfigError(
            f"{where}: this is the result of prompt line {number}, and there are {len(keys)}; name "
            "another file"
        )
    if result["key"] != keys[number]:
        raise ConfigError(
            f"{where}: computed for another prompt, id or settings than line {number} of the "
            "prompts has now; name another file, or ask for what was asked before"
        )


def require_empty(path: str) -> None:
    """Raises ConfigError where results could be lost."""
    target = files.real_path(path)
    if target.is_file() and target.stat().st_size:
        raise ConfigError(
            f"--output {path}: there is something in it already; go on with --resume, or name "
            "another file"
        )


def require_other_file(path: str, prompts: str) -> None:
    """Raises ConfigError where the results would take the place of the prompts."""
    target, source = files.real_path(path), files.real_path(prompts)
    if target.is_file() and source.is_file() and target.samefile(source):
        raise ConfigError(f"--output {path}: this is the file of --prompts; name another one")


def require_same_model(path: str, kept: dict[int, Kept], model: str) -> None:
    """Raises ConfigError where a result was computed by another one."""
    other = next((number for number, one in kept.items() if one.model != model), None)
    if other is not None:
        raise ConfigError(
            f"--output {path}: the result of prompt line {other} was computed by another model, "
            "precision or version of dspark-jax; name another file, or use what computed it"
        )


def leading(kept: dict[int, Kept]) -> int:
    """How many results there are before the first gap."""
    return next(number for number in itertools.count(1) if number not in kept) - 1


@contextlib.contextmanager
def opened(path: str, kept: dict[int, Kept]) -> Iterator[Callable[[str], None]]:
    """write(text), which puts a line after the leading results, at once. What else the file held
    is gone.
    """
    target = files.real_path(path)
    if target.is_file() or not target.exists():
        texts = [kept[number].text for number in range(1, leading(kept) + 1)]
        content = "".join(text + "\n" for text in texts).encode()
        if not target.exists() or target.read_bytes() != content:
            files.write_bytes(target, content)
    with open(target, "ab", buffering=0) as file:

        def write(text: str) -> None:
            rest = (text + "\n").encode()
            with files.naming(target):
                while rest:
                    rest = rest[file.write(rest) :]

        yield write


class InOrder:
    """Hands lines on in the order of their numbers, each once it and all before it are there.

    numbers: those to come, in their order. Ctrl-C does not tear a line.
    """

    def __init__(self, numbers: Iterable[int], write: Callable[[str], None]):
        self._waiting, self._ready, self._write = deque(numbers), {}, write
        self.written = 0

    def add(self, number: int, text: str) -> None:
        self._ready[number] = text
        with deferred_interrupts():
            while self._waiting and self._waiting[0] in self._ready:
                self._hand_on()

    def end(self) -> None:
        """No more will come: those that are there follow, with gaps between them."""
        with deferred_interrupts():
            while self._waiting:
                if self._waiting[0] in self._ready:
                    self._hand_on()
                else:
                    self._waiting.popleft()

    def _hand_on(self) -> None:
        self._write(self._ready[self._waiting[0]])
        del self._ready[self._waiting.popleft()]
        self.written += 1
