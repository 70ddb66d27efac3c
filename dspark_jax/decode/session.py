"""A session: tokens that go on being added to, by the caller and by the model, each computed once.

What a session remembers of its tokens is a cache of one stream, the drafter's part included: a
cache without it would make drafts from the middle of nowhere, and acceptance would collapse. The
cache holds all tokens but the last ones, `pending`: at least one, whose row chooses the next token,
and in plain mode, which does not prime the drafter, all that were generated. They are computed with
what comes next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator

import jax
import numpy as np

from dspark_jax.decode import session_file
from dspark_jax.decode.generate import GenerateOutput, StreamEvent, completed, events
from dspark_jax.decode.options import SEEDS, Options
from dspark_jax.decode.programs import programs
from dspark_jax.decode.request import encode, make_request, require_ids
from dspark_jax.decode.run import Run
from dspark_jax.decode.slots import greedy_settings
from dspark_jax.decode.state import Chunk, Variant
from dspark_jax.decode.steps import new_cache
from dspark_jax.errors import ConfigError, PromptError
from dspark_jax.loading.load import Model, require_model
from dspark_jax.model.cache import Cache
from dspark_jax.runtime.interrupts import deferred_interrupts
from dspark_jax.runtime.scalars import whole_number
from dspark_jax.runtime.settings import own_settings

# Options of `dspark.generate` that a turn of a session may have, beside those that it names.
OPTIONS = {field.name for field in dataclasses.fields(Options)} - {"max_new_tokens", "seed"}


class Session:
    """One stream of a model, continued turn by turn.

        session = dspark.Session(model)
        session.feed("def add(a, b):")
        out = session.generate(max_new_tokens=40)
        session.feed("\\n\\ndef subtract")
        for event in session.stream(max_new_tokens=40): ...

    After any turns the tokens, drafts and log-probabilities are those of a fresh run over the same
    ids, bit for bit on a CPU. (On accelerators the rows of a call choose kernels, and prefill has
    more of them than a round: the same tokens, near ties apart.)

    Threads that use one session wait for each other.

    model: its Model. tokens: all of them, list of ids. position: how many. seed: of the noise where
    tokens are drawn (the key of a session is fold_in(key(seed), 0)); a fork has another one.
    """

    def __init__(self, model: Model, seed: int = 0):
        require_model(model, "Session")
        self.model, self.seed, self.tokens = model, _checked(seed), []
        self.cache: Cache | None = None
        self._computed = 0  # tokens that the cache holds
        # Of the whole family of forks: those that are alive, all seeds that there were, and what is
        # counted for further ones.
        self._family = weakref.WeakSet([self])
        self._seeds, self._later = {self.seed}, itertools.count(self.seed + 1)
        self._lock = threading.RLock()  # one for several calls: a turn forks what it continues
        self._events_of: weakref.ref | None = None  # the iterator that `stream` gave last

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> tuple[int, ...]:
        """The last tokens, which the cache does not hold."""
        return tuple(self.tokens[self._computed :])

    def __repr__(self) -> str:
        return f"Session({self.position} of {self.model.limits.max_seq_len} tokens)"

    def feed(self, prompt) -> Session:
        """Adds text (str) or token ids, and computes all but the last. Text is encoded as
        tokenizer.json says where it begins the session, and by itself after that: tokens do not
        join over the border.

        Raises PromptError for ids outside the vocabulary, for no tokens, and for more than
        max_seq_len holds, and ConfigError amid a stream; then nothing is added.
        """
        with self._lock:
            self._require_no_stream("feed")
            ids, most = self._encoded(prompt), self.model.limits.max_seq_len
            if self.position + len(ids) > most:
                raise PromptError(
                    f"feed: {len(ids)} tokens after the {self.position} of this session do not "
                    f"fit into max_seq_len {most}; load with a larger one, or begin a new session"
                )
            self.tokens += ids
            self._compute(self.position - 1)
        return self

    def generate(
        self, max_new_tokens: int = 128, seed: int | None = None, progress=False, **options
    ) -> GenerateOutput:
        """Continues the session; its tokens grow by those of the output. seed: None: the session's
        own. options: those of `dspark.generate`.

        Returns a GenerateOutput with one entry. Raises as `dspark.generate` does, and ConfigError
        amid a stream; what was emitted before stays in the session.
        """
        with self._lock:
            run = self._run("generate", max_new_tokens=max_new_tokens, seed=seed, **options)
            before = self.position
            try:
                return completed(run, progress)
            finally:
                self._adopt(run, before)

    def stream(
        self, max_new_tokens: int = 128, seed: int | None = None, **options
    ) -> Iterator[StreamEvent]:
        """Like `generate`, yielding a StreamEvent a round. The session's tokens grow with every
        event; closing the iterator ends it there. Until it has ended the session may be forked and
        saved as it is by then, but not continued otherwise.
        """
        with self._lock:
            run = self._run("stream", max_new_tokens=max_new_tokens, seed=seed, **options)
            run.compile()
            events = self._events(run, self.position)
            self._events_of = weakref.ref(events)
        return events

    def _events(self, run: Run, before: int) -> Iterator[StreamEvent]:
        with contextlib.closing(events(run)) as iterator:
            try:
                for event in iterator:
                    self.tokens = self.tokens[:before] + run.prompts[0].tokens
                    yield event
            finally:
                self._adopt(run, before)

    def fork(self, seed: int | None = None) -> Session:
        """A session with the same tokens, which goes on by itself; what is computed is shared.
        seed: None: the next one that no session of this family has had. (One that was loaded from
        a file begins a family of its own.)
        """
        with self._lock:
            other = Session(self.model, self._next_seed() if seed is None else seed)
            other.tokens, other._computed = list(self.tokens), self._computed
            other.cache, other._family = self.cache, self._family
            other._seeds, other._later = self._seeds, self._later
            self._family.add(other)
            self._seeds.add(other.seed)
        return other

    def _next_seed(self) -> int:
        return next(n % SEEDS for n in self._later if n % SEEDS not in self._seeds)

    def save(self, path) -> None:
        """Writes it to a safetensors file; what was there is replaced once the new one is whole.
        Raises OSError where that is not possible.
        """
        with self._lock:
            session_file.write(path, self.model, self.seed, self.tokens, self._computed, self.cache)

    @classmethod
    def load(cls, model: Model, path) -> Session:
        """A session that `save` wrote.

        Raises CheckpointError for a file that is none, or is damaged, and ConfigError for one of
        another model, precision or size of rings, naming what differs.
        """
        require_model(model, "Session.load")
        saved = session_file.read(path, model)
        session = cls(model, saved.seed)
        session.tokens, session._computed, session.cache = saved.tokens, saved.computed, saved.cache
        return session

    def _encoded(self, prompt) -> list[int]:
        encoded = encode(self.model, prompt, begins=self.position == 0)
        if len(encoded) != 1:
            raise PromptError(f"feed: one text or one list of token ids, got {len(encoded)}")
        if not encoded[0]:
            raise PromptError("feed: there is nothing in it; at least one token is needed")
        require_ids("feed", encoded[0], self.model.config.vocab_size)
        return encoded[0]

    def _require_no_stream(self, what: str) -> None:
        events = self._events_of and self._events_of()
        if events is not None and events.gi_frame is not None:
            raise ConfigError(
                f"{what}: a stream of this session has not ended; read its events to the end or "
                "close() them, or go on with a fork()"
            )

    def _run(self, what: str, max_new_tokens, seed, **options) -> Run:
        self._require_no_stream(what)
        for name in options.keys() - OPTIONS:
            raise TypeError(f"Session.{what}() got an unexpected keyword argument {name!r}")
        if not self.tokens:
            raise PromptError("this session is empty: feed it at least one token first")
        if options.get("prompt_logprobs"):
            raise ConfigError(
                "prompt_logprobs: a turn of a session has no prompt of its own; for those of its "
                "tokens use dspark.generate(model, session.tokens, prompt_logprobs=True)"
            )
        options["seed"] = [self.seed if seed is None else _checked(seed)]
        options["max_new_tokens"] = max_new_tokens
        request = make_request(self.model, [[]], prefix=self, **options)
        if request.streams != 1:
            raise ConfigError("streams: a session is one stream; use generate(..., prefix=session)")
        by_round = what == "stream"
        return Run(self.model, request, by_round=by_round, with_text=by_round)

    def _adopt(self, run: Run, before: int) -> None:
        """Takes over what a run emitted, and what it computed where the cache holds that and
        nothing else: not if it was given up, ended by a string, or did not prime the drafter.
        """
        said = run.prompts[0]
        ended_on_device = said.finished and not isinstance(said.stop_reason, str)
        with self._lock:
            self.tokens = self.tokens[:before] + said.tokens
            if ended_on_device and (run.request.mode != "plain" or len(said.tokens) == 1):
                self.cache, self._computed = run.engine.last_cache(), self.position - 1

    def _compute(self, end: int) -> None:
        """Computes the tokens up to number `end`, so that the cache holds them. After Ctrl-C it
        holds some of them.
        """
        model, size = self.model, self.model.limits.prefill_chunk
        if end <= self._computed:
            return
        with own_settings(model.mesh):
            begin = programs(model.structure, model.mesh, model.limits, Variant("plain")).begin
            settings = greedy_settings(model)
            while self._computed < end:
                part = self.tokens[self._computed : min(self._computed + size, end)]
                with deferred_interrupts():  # the program takes the old cache away
                    cache = self._own_cache()
                    self.cache, _ = begin(model.arrays, cache, settings, _chunk(part, size))
                    self._computed += len(part)

    def _own_cache(self) -> Cache:
        """One that may be written over."""
        if self.cache is None:
            return new_cache(self.model)
        shared = any(one is not self and one.cache is self.cache for one in self._family)
        return _copy(self.cache) if shared else self.cache


@functools.partial(jax.jit)
def _copy(cache: Cache) -> Cache:
    return jax.tree.map(lambda leaf: leaf.copy(), cache)


def _chunk(part: list[int], size: int) -> Chunk:
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(part)] = part
    return Chunk(
        fresh=np.zeros(1, np.bool_),
        tokens=tokens,
        valid=np.array([len(part)], np.int32),
        following=np.zeros((1, size), np.int32),
        remaining=np.zeros(1, np.int32),
    )


def _checked(seed) -> int:
    return whole_number("seed", seed, 0, SEEDS - 1)
