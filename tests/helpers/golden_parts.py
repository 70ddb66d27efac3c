"""The golden model played through, and its parts run one at a time on inputs of the golden files.

A part is a function f(config, module, *arrays). `run` compiles it once for each structure of
module, so that equal layers share a program; `run_changed` compiles it anew, after a test has put a
mistake into the library.
"""

import dataclasses
import functools
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import dspark_jax as dspark
from dspark_jax.model.cache import new_layer_cache
from dspark_jax.model.layers import cached
from dspark_jax.model.layers.cached import Rows, attend_cached, new_rows
from dspark_jax.model.layers.rope import rotation
from dspark_jax.model.parameters import ColumnsFirst
from dspark_jax.model.segments import segments
from dspark_jax.runtime import backend

from helpers.support import MAX_SEQ_LEN

ROWS = 48  # rows of every part program; shorter prompts are padded
VERIFY = 6  # rows of every extend, so that one program serves all tests


# Running parts


def run(function, config, module, *args):
    graphdef, state = nnx.split(module)
    return _call(_compiled(function, config, graphdef), state, args)


def run_changed(function, config, module, *args):
    graphdef, state = nnx.split(module)
    return _call(_jitted(function, config, graphdef), state, args)


def _call(function, state, args):
    """NumPy in and out: an argument that already lies on a device would compile it once more."""
    return jax.tree.map(np.asarray, function(state, *jax.tree.map(np.asarray, args)))


def _jitted(function, config, graphdef):
    """Without LLVM's optimisations: half the time to compile, and the same deviations."""
    options = {**(backend.compiler_options() or {}), "xla_backend_optimization_level": 0}
    return jax.jit(
        lambda state, *args: function(config, nnx.merge(graphdef, state), *args),
        compiler_options=options,
    )


_compiled = functools.lru_cache(maxsize=None)(_jitted)


def layer_block(model, layer: int):
    """One main layer as a Block without the axis over stacked layers."""
    for plan, blocks in zip(segments(model.config), model.module.main.segments):
        for member, block in enumerate(blocks):
            if layer in plan.layer_ids(member):
                return _one_of(block, plan.layer_ids(member).index(layer))
    raise IndexError(layer)


def _one_of(block, index: int):
    graphdef, state = nnx.split(block)
    return nnx.merge(graphdef, jax.tree.map(lambda a: np.asarray(a)[index], state))


def with_values(module, changes: dict):
    """A copy of the module with some parameters changed; changes: path such as "attn.sink" ->
    function of the old value.
    """
    graphdef, state = nnx.split(module)
    flat = dict(nnx.to_flat_state(state))
    for path, change in changes.items():
        key = tuple(int(part) if part.isdigit() else part for part in path.split("."))
        value, old = change(np.array(flat[key][...])), flat[key][...]
        if isinstance(flat[key], ColumnsFirst):
            value, old = np.ascontiguousarray(np.swapaxes(value, -1, -2)), flat[key].columns
        # A program is compiled anew for arguments that lie elsewhere.
        flat[key] = flat[key].replace(
            jax.device_put(value, old.sharding) if isinstance(old, jax.Array) else value
        )
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())))


def pad_rows(x, rows: int = ROWS):
    """[n, ...] -> [1, rows, ...]"""
    x = np.asarray(x)
    return np.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1))[None]


# The parts


def rotary_rows(config, _, position, valid) -> Rows:
    return new_rows(config, position, ROWS, valid)


def attention(config, block, x, rows: Rows, fill=0.0):
    """Attention of a whole prompt: x [1, ROWS, D] (after attn_norm) -> output, cache, indexer.
    fill: what the cache holds.
    """
    cache = new_layer_cache(config, block.kind, 1, 1, MAX_SEQ_LEN, ROWS, jnp.float32)
    cache = jax.tree.map(lambda a: jnp.full_like(a, fill), cache)
    y, cache = attend_cached(block, config, x, rows, cache, 0)
    return y, cache, _indexer(config, block, x, rows, cache)


def _indexer(config, block, x, rows, cache):
    """Scores [1, ROWS, entries] against every slot, the picks [1, ROWS, K] and which of them exist;
    None without an indexer.
    """
    if block.indexer is None:
        return None
    low, _ = block.attn.queries(x, rows.compressed)
    indexer, entries = block.indexer, cache.index_entries
    scores = indexer.scores(
        indexer.queries(low, rows.compressed), indexer.head_weights(x), entries[0]
    )
    return scores, *cached._choose(indexer, config, x, low, rows, entries, 0, block.kind.ratio)[:2]


def moe(config, block, x, ids, mask):
    """x [1, ROWS, D] (after ffn_norm) -> output, (chosen, weights, scores)."""
    return block.ffn(x, ids, mask, "decode")


def whole_layer(config, block, streams, ids, valid):
    """streams [1, ROWS, M, D] -> everything the golden files know of a layer."""
    rows, seen = new_rows(config, jnp.zeros((1,), jnp.int32), ROWS, valid), {}
    ffn, ffn_call = type(block.ffn), type(block.ffn).__call__

    def attend(x):
        y, cache, index = attention(config, block, x, rows)
        seen.update(attn_in=x, attn_out=y, cache=cache, index=index)
        return y, None

    def recorded(self, x, *args):
        y, routing = ffn_call(self, x, *args)
        seen.update(moe_in=x, moe_out=y)
        return y, routing

    split = tuple(streams[:, :, j] for j in range(streams.shape[2]))
    with unittest.mock.patch.object(ffn, "__call__", recorded):
        out, _, (chosen, weights, _) = block(split, attend, ids, rows.mask, "decode")
    return dict(seen, out=jnp.stack(out, axis=2), chosen=chosen, weights=weights)


def embed(config, main, ids):
    return jnp.stack(main.streams(ids), axis=2)


def main_head(config, main, streams):
    """streams [1, ROWS, M, D] -> logits [1, ROWS, V]"""
    return main.logits(main.collapse(tuple(streams[:, :, j] for j in range(streams.shape[2]))))


def stage_keys(config, drafter, hidden, positions):
    """hidden [1, n, N*D] at positions [1, n] -> what stage keys are made of [1, n, D], and the keys
    [Z, 1, n, C].
    """
    return drafter.main_x(hidden), drafter.stage_keys(hidden, rotation(config, False, positions))


def draft_from_hidden(config, module, hidden, positions, token):
    """Draft from 16 captured hidden [1, 16, N*D] at positions [1, 16], the first a multiple of 16
    and the last the seed.
    """
    rings = module.drafter.stage_keys(hidden, rotation(config, False, positions))
    position = positions[:, -1] + 1
    y, (_, chosen) = module.drafter.run_stages(module.main, rings, position, token)
    return module.drafter.decode(module.main, y, token, position), chosen


def draft_parts(config, module, rings, position, token):
    """rings [Z, 1, n, C], position [1], token [1] -> stage outputs, routing, head input, base
    logits, and the Draft.
    """
    y, (streams, chosen) = module.drafter.run_stages(module.main, rings, position, token)
    base = module.drafter.base_logits(module.main, y)
    return dict(
        stage_out=jnp.stack(streams, axis=3),
        chosen=chosen,
        head_hidden=y,
        base_logits=base,
        draft=module.drafter.decode(module.main, y, token, position),
    )


# The golden model played through


@dataclasses.dataclass
class Played:
    """One prompt: prefill, then the golden tokens. NumPy, no batch axis; `caches` by number of
    tokens decoded.
    """

    prefill_logits: np.ndarray
    prefill_hidden: np.ndarray
    decode_logits: np.ndarray
    decode_hidden: np.ndarray
    caches: dict


def feed(model, cache, ids):
    """extend + commit of 1 to 6 tokens of one stream, always in the same program: logits [n, V],
    hidden [n, N*D], cache.
    """
    count = len(ids)
    tokens = np.zeros((1, VERIFY), np.int32)
    tokens[0, :count] = ids
    logits, hidden, cache = dspark.extend(model, cache, tokens, [count])
    return (
        np.asarray(logits[0, :count]),
        np.asarray(hidden[0, :count]),
        dspark.commit(cache, [count]),
    )


def play(model, expected, prompt: int) -> Played:
    ids, fed = expected[f"p{prompt}.ids"], expected[f"p{prompt}.decode_ids"]
    logits, hidden, cache = dspark.prefill(model, ids.tolist())
    caches, outs, done = {0: cache}, [], 0
    for count in (6, 3, 6, 6, 3):  # a draft case starts after 9 steps
        *out, cache = feed(model, cache, fed[done : done + count])
        done += count
        outs.append(out)
        caches[done] = cache
    assert done == len(fed)
    decoded = [np.concatenate(parts) for parts in zip(*outs)]
    return Played(np.asarray(logits[0]), np.asarray(hidden[0]), *decoded, caches)


def speculate(model, prompt_ids, rounds: int):
    """The loop of spec section 12 by hand, all drafts verified: the golden log's arrays by name."""
    logits, _, cache = dspark.prefill(model, prompt_ids.tolist())
    committed, log = int(logits[0, -1].argmax()), []
    for _ in range(rounds):
        draft = dspark.draft(model, cache, [committed])
        proposed = np.asarray(draft.tokens[0])
        logits, _, cache = dspark.extend(
            model, cache, np.append(committed, proposed)[None], [VERIFY]
        )
        best = np.asarray(logits[0].argmax(-1))
        accepted = int(np.argmin(np.append(best[:-1] == proposed, False)))
        verified = np.where(np.arange(VERIFY) <= accepted, best, -1)
        log.append(
            dict(
                pos=int(cache.position[0]),
                committed=committed,
                draft_ids=proposed,
                verify_ids=verified,
                accepted=accepted,
                confidence=np.asarray(draft.confidence[0]),
            )
        )
        cache, committed = dspark.commit(cache, [accepted + 1]), int(best[accepted])
    arrays = {name: np.array([entry[name] for entry in log]) for name in log[0]}
    arrays["emitted"] = np.concatenate(
        [[e["committed"], *e["draft_ids"][: e["accepted"]]] for e in log]
    )
    return arrays


def draft_case(expected, case: int):
    """Golden draft case: position [1] and token [1] of the anchor, hidden [16, N*D] and positions
    [16] of the seed's window.
    """
    start, token = int(expected[f"d{case}.start"][0]), expected[f"d{case}.committed"]
    known = [
        expected[f"p{case}.{part}_hidden"]
        for part in ("prefill", "decode")
        if f"p{case}.{part}_hidden" in expected
    ]
    positions = np.arange(16) + max(start - 15, 0)
    hidden = np.concatenate([*known, np.zeros((16, known[0].shape[1]), np.float32)])[positions]
    position = np.array([start + 1], np.int32)
    return types.SimpleNamespace(
        position=position, token=token, hidden=hidden, positions=positions, start=start
    )


def rings_of(keys, case):
    """keys [Z, 1, 16, C] at the case's positions -> rings of 16 slots with what lies beyond the
    seed left at zero.
    """
    rings = np.zeros(keys.shape, np.float32)
    for i, position in enumerate(case.positions):
        if position <= case.start:
            rings[:, :, position % 16] = np.asarray(keys)[:, :, i]
    return rings


def draft_of(model, expected, runner=run, change=None, **inputs):
    """Golden draft case 1 (seed at 31, anchor at 32) from its captured hidden: a NumPy Draft
    without batch axis, and routing.
    """
    case = draft_case(expected, 1)
    given = (
        dict(
            hidden=case.hidden[None],
            positions=case.positions[None].astype(np.int32),
            token=case.token,
        )
        | inputs
    )
    draft, chosen = runner(
        draft_from_hidden, model.config, with_values(model.module, change or {}), *given.values()
    )
    return jax.tree.map(lambda a: a[0], draft), chosen[:, 0]
