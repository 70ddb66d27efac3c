"""Prefills prompts, one at a time on each row of the mesh's data axis, chunk by chunk."""

from __future__ import annotations

from collections.abc import Container

import jax
import numpy as np

from dspark_jax.decode.emission import TokenLogprob, told
from dspark_jax.decode.programs import Programs
from dspark_jax.decode.request import Request
from dspark_jax.decode.slots import Slots
from dspark_jax.decode.state import Begun, Chunk
from dspark_jax.decode.steps import new_cache
from dspark_jax.loading.load import Model
from dspark_jax.model.cache import Cache
from dspark_jax.runtime.sharding import DATA, fetch


class Prefill:
    """prompt_logprobs: prompt number -> a TokenLogprob of each of its tokens, where asked for.
    spoiled: rows of the data axis whose cache may hold what is not finite.
    """

    def __init__(self, model: Model, request: Request, programs: Programs, slots: Slots):
        self._model, self._request, self._programs, self._slots = model, request, programs, slots
        self._rows, self._size = model.mesh.shape[DATA], model.limits.prefill_chunk
        # What stands before every prompt, as it is now: the session may go on meanwhile.
        self._prefix = request.prefix and request.prefix.fork(request.prefix.seed)
        self._computed = self._prefix and self._prefix.cache  # a cache, or None
        self.prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self.spoiled: set[int] = set()

    def arguments(self, cache: Cache, numbers: dict[int, int], at: int, settings=None) -> tuple:
        """Of the program that computes, on each row of `numbers`, the part of its prompt from `at`
        on. settings: as they are on the device already.
        """
        if settings is None:
            prompts = self._request.prompts
            rows = [prompts[numbers[r]] if r in numbers else None for r in range(self._rows)]
            settings = self._slots.settings(rows)
        return self._model.arrays, cache, settings, self._chunk(numbers, at)

    def run(self, cache: Cache, numbers: dict[int, int]) -> tuple[Cache, dict[int, Begun]]:
        """The prompts of these numbers, row -> number, into a cache of one stream a row, which is
        reused: the cache, and for each row what the chunk said, to all rows, that its prompt ended
        with. A prompt that has ended takes no rows of later chunks.
        """
        begun: dict[int, Begun] = {}
        if self._computed is not None:
            cache = self._with(self._computed, cache, numbers)
        elif self.spoiled:  # what a mask gives a weight of 0 must be a number all the same
            cache = self._with(new_cache(self._model), cache, self.spoiled)
        self.spoiled.clear()
        settings = None
        for at in range(0, max(map(len, map(self._ids, numbers.values()))), self._size):
            arguments = self.arguments(cache, numbers, at, settings)
            settings = arguments[2]
            cache, said = self._programs.begin(*arguments)
            ending = [
                row for row, n in numbers.items() if at < len(self._ids(n)) <= at + self._size
            ]
            if ending or self._request.prompt_logprobs:
                said = fetch(self._model.mesh, said)
                self._note_logprobs(numbers, at, said)
            begun |= dict.fromkeys(ending, said)
        return cache, begun

    def length(self, number: int) -> int:
        """Tokens before the first one that this prompt emits."""
        before = self._prefix.position if self._prefix else 0
        return before + len(self._request.prompts[number].ids)

    def _ids(self, number: int) -> tuple[int, ...]:
        """What is to be computed: of the prefix, what its cache does not hold."""
        pending = self._prefix.pending if self._prefix else ()
        return (*pending, *self._request.prompts[number].ids)

    def _with(self, one: Cache, cache: Cache, rows: Container[int]) -> Cache:
        """The cache with the stream of `one` on these rows."""
        places = [0 if row in rows else 1 for row in range(self._rows)]
        return self._programs.seat(cache, one, np.array(places, np.int32))

    def _chunk(self, numbers: dict[int, int], at: int) -> Chunk:
        tokens, following = (np.zeros((self._rows, self._size), np.int32) for _ in range(2))
        valid, remaining = (np.zeros(self._rows, np.int32) for _ in range(2))
        fresh = np.zeros(self._rows, np.bool_)
        for row, number in numbers.items():
            ids = self._ids(number)
            part, after = ids[at : at + self._size], ids[at + 1 : at + 1 + self._size]
            tokens[row, : len(part)], following[row, : len(after)] = part, after
            valid[row], fresh[row] = len(part), at == 0 and self._computed is None
            remaining[row] = self._request.prompts[number].max_new_tokens
        return Chunk(fresh, tokens, valid, following, remaining)

    def _note_logprobs(self, numbers: dict[int, int], at: int, said: Begun) -> None:
        """What the rows of this chunk said of the tokens that follow them."""
        if said.prompt is None:
            return
        best = self._request.logprobs or 0
        for row, number in numbers.items():
            ids = self._ids(number)
            after = ids[at + 1 : at + 1 + self._size]
            if at == 0:
                self.prompt_logprobs[number] = [TokenLogprob(ids[0], None)]
            self.prompt_logprobs[number] += told(said.prompt, row, after, best)
            if at + self._size >= len(ids):  # a prefix is no part of the prompt
                own = len(self._request.prompts[number].ids)
                kept = self.prompt_logprobs[number]
                self.prompt_logprobs[number] = kept[len(kept) - own :]


def of_row(begun: Begun, row: int) -> Begun:
    return jax.tree.map(lambda leaf: leaf[row], begun)
