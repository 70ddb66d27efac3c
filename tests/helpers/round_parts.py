"""What the tests of rounds and of generate share: a drafter that says what a test wants, damaged
weights, and a count of compilations.

Everything that differs from test to test is data of one module structure, so that all of them run
the same few programs.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import dspark_jax as dspark
from dspark_jax.model.drafter import Draft, most_likely

from helpers.support import MAX_SEQ_LEN

OWN = -1  # in a script: what the model's own drafter proposes
BLOCK = 5  # the golden model's dspark_block_size


class ScriptedDrafter(nnx.Module):
    """The model's drafter, overruled by a script of tokens and confidences for every position of
    the stream.
    """

    def __init__(self, drafter):
        self.own = drafter
        self.tokens = nnx.Variable(jnp.full((MAX_SEQ_LEN + BLOCK + 1,), OWN, jnp.int32))
        self.confidence = nnx.Variable(jnp.full((MAX_SEQ_LEN + BLOCK + 1,), np.nan, jnp.float32))

    def prime(self, *arguments):
        return self.own.prime(*arguments)

    def draft(self, main, cache, position, token, hidden=None, choose=most_likely):
        own = self.own.draft(main, cache, position, token, hidden, choose)
        at = position[:, None] + 1 + jnp.arange(own.tokens.shape[1])
        tokens, confidence = self.tokens[...][at], self.confidence[...][at]
        return Draft(
            jnp.where(tokens == OWN, own.tokens, tokens),
            own.logits,
            jnp.where(jnp.isnan(confidence), own.confidence, confidence),
        )


def scripted(model, tokens=(), confidence=(), tokenizer=None, nan_tokens=()):
    """A copy of the model with a script: tokens by position, OWN (or an end) for the drafter's own;
    confidence likewise, with NaN.

    nan_tokens: ids whose embedding is NaN in the copy, which makes the logits after them NaN.
    """
    module = _copy(model.module)
    if not isinstance(module.drafter, ScriptedDrafter):
        module.drafter = ScriptedDrafter(module.drafter)
    module.drafter.tokens[...] = _padded(tokens, module.drafter.tokens[...], OWN)
    module.drafter.confidence[...] = _padded(confidence, module.drafter.confidence[...], np.nan)
    return with_nan_tokens(
        dataclasses.replace(model, module=module, tokenizer=tokenizer), nan_tokens
    )


def with_nan_tokens(model, ids):
    """A copy whose embeddings of these tokens are NaN."""
    if not ids:
        return model
    module = _copy(model.module)
    module.main.embed[...] = module.main.embed[...].at[jnp.asarray(ids)].set(jnp.nan)
    return dataclasses.replace(model, module=module)


def with_nan_drafter(model, path):
    """A copy whose drafter has a NaN parameter: its path below the drafter, such as norm.weight."""
    module = _copy(model.module)
    drafter = module.drafter.own if isinstance(module.drafter, ScriptedDrafter) else module.drafter
    variable = functools.reduce(
        lambda at, part: at[int(part)] if part.isdigit() else getattr(at, part),
        path.split("."),
        drafter,
    )
    variable[...] = jnp.full_like(variable[...], jnp.nan)
    return dataclasses.replace(model, module=module)


def _copy(module):
    """Variables of its own, the same arrays."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))


def _padded(values, like, rest):
    return jnp.asarray(np.append(values, np.full(like.size - len(values), rest)), like.dtype)


def perfect(model, prompt, plain, **options):
    """Proposes the plain continuation."""
    return scripted(model, [*prompt, *plain], **options)


def hostile(model, prompt, plain, **options):
    """Proposes another id than the plain continuation at every position."""
    return scripted(model, wrong([*prompt, *plain], model.config.vocab_size), **options)


def wrong(tokens, vocab_size):
    return [(token + 1) % vocab_size for token in tokens]


@contextlib.contextmanager
def compilations():
    """The names of the programs compiled (or fetched from the cache of compiled ones) within."""
    names = []

    def listener(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def byte_tokenizer():
    """A tokenizer of 256 entries: id = byte."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # The printable stand-ins of bytes in byte-level vocabularies, in the order of the bytes that
    # they stand for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def continuation(model, prompt, length, mode, **options):
    """The tokens and the records of one prompt."""
    out = dspark.generate(model, prompt, length, mode, **({"stop_token_ids": []} | options))
    return out.tokens[0], out.rounds[0]
