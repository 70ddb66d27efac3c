"""One round at a time, two streams at once, in float mode: what it computes, commits, counts and
leaves alone. The model is the golden one's last four layers, in `make heavy` all of it.

Stream 0 continues golden prompt 0 (6 tokens), stream 1 golden prompt 1 (23). A script is right for
stream 0 where it says so.
"""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import dspark_jax as dspark
from dspark_jax.decode import gate as gates
from dspark_jax.decode import round as rounds
from dspark_jax.decode.sampling import Choice
from dspark_jax.decode.state import MARGIN_SKIP, NOT_SKIPPED, RoundState, Settings, Variant
from dspark_jax.runtime.backend import jit

from helpers.ask_parts import modes, speculative_modes
from helpers.round_parts import BLOCK, perfect, same_bits, scripted, wrong
from helpers.state_parts import committed, joined

# In `make test` test_generate.py and test_streams.py compare the same to the last bit.
pytestmark = pytest.mark.heavy
LENGTH = 30  # tokens of the plain streams
OFF = dspark.GateConfig()
NO_STOPS = np.full((2, 8), -1, np.int32)


@functools.cache
def program(graphdef, limits, mode):
    variant = Variant(mode)
    return jit(lambda state, *args: rounds.step(nnx.merge(graphdef, state), limits, variant, *args))


def step(model, mode, state, gate=OFF, stop_ids=NO_STOPS):
    """One round: the state after it, what it did, and the logits, all on the host, so that every
    call finds its arguments alike.
    """
    config = jax.tree.map(
        lambda n: np.asarray(n, np.float32) if isinstance(n, float) else np.asarray(n), gate
    )
    choice = Choice(np.zeros((2, model.config.vocab_size), np.float32), sampling=None)
    ones = np.ones((2, model.config.dspark_block_size), np.float32)
    unscaled = ones, 0 * ones
    state, output, logits = program(model.split[0], model.limits, mode)(
        model.split[1], config, Settings(choice, stop_ids, *unscaled), state
    )
    return jax.device_get((state, output, logits))


@pytest.fixture(scope="module")
def model(float_model):
    return scripted(float_model)


@pytest.fixture(scope="module")
def prompts(expected_float):
    return [expected_float[f"p{i}.ids"] for i in range(2)]


@pytest.fixture(scope="module")
def start(float_model, prompts):
    """The state after the prompts, on the host."""
    logits, _, caches = zip(*(dspark.prefill(float_model, prompt.tolist()) for prompt in prompts))
    last = np.stack([np.asarray(rows[0, -1]) for rows in logits])
    second, best = np.sort(last, axis=-1)[:, -2:].T
    return RoundState(
        cache=jax.device_get(joined(caches)),
        anchor=last.argmax(-1).astype(np.int32),
        margin=best - second,
        remaining=np.full(2, LENGTH, np.int32),
        done=np.zeros(2, bool),
        faulty=np.full(2, -1, np.int32),
        gate=jax.device_get(gates.init(OFF, 2)),
    )


@pytest.fixture(scope="module")
def plain(model, start):
    """Plain decoding: tokens [2, 30] and logits [2, 30, V] after the anchor, and the state after
    every step, the first one included.
    """
    tokens, logits, states = [], [], [start]
    for _ in range(LENGTH):
        state, output, row = step(model, "plain", states[-1])
        assert output.emitted.tolist() == [1, 1]
        tokens.append(output.tokens[:, 0])
        logits.append(row[:, 0])
        states.append(state)
    assert np.all(states[-1].done) and not np.any(states[-2].done)
    return np.stack(tokens, 1), np.stack(logits, 1), states


@pytest.fixture(scope="module")
def oracle(model, prompts, start, plain):
    """Proposes the plain continuation of stream 0 to both."""
    return perfect(model, prompts[0].tolist(), [int(start.anchor[0]), *plain[0][0].tolist()])


@pytest.fixture(scope="module")
def half(model, prompts, start, plain):
    """Right for stream 0 at random positions."""
    stream = [int(start.anchor[0]), *plain[0][0].tolist()]
    right = np.random.default_rng(1).random(len(stream)) < 0.7
    return scripted(
        model, [*prompts[0].tolist(), *np.where(right, stream, wrong(stream, 256)).tolist()]
    )


@speculative_modes
@pytest.mark.parametrize("drafter", ["model", "oracle", "half"])
@pytest.mark.parametrize(
    "gate",
    [
        OFF,
        dspark.GateConfig(
            enabled=True,
            margin=1.0,
            draft_ms=10,
            verify_base_ms=200,
            verify_slope_ms=80,
            margin_threshold=1.5,
        ),
    ],
    ids=["off", "on"],
)
def test_committed_logits_are_those_of_plain_decoding(mode, drafter, gate, start, plain, request):
    """Bit for bit, in every row up to the accepted one, of both streams, until both are done."""
    model, state, seen = request.getfixturevalue(drafter), start, np.zeros(2, int)
    lengths = set()
    while not np.all(state.done):
        state, output, logits = step(model, mode, state, gate)
        for b in range(2):
            emitted = output.emitted[b]
            assert emitted == (0 if seen[b] >= LENGTH else output.accepted[b] + 1)
            kept = max(0, min(emitted, LENGTH - seen[b]))
            at = slice(seen[b], seen[b] + kept)
            assert output.tokens[b, :kept].tolist() == plain[0][b, at].tolist()
            assert same_bits(logits[b, :kept], plain[1][b, at])
            seen[b] += emitted
            lengths.add(int(output.accepted[b]))
    assert len(lengths) > 2


def gap(logits):
    """top1 - top2, by sorting."""
    second, best = np.sort(logits, axis=-1)[..., -2:].T
    return best - second


@speculative_modes
def test_a_round_begins_with_the_margin_of_its_anchor(mode, half, start, plain):
    """Bit for bit that of the plain logits at the row that chose the anchor, whatever row of the
    round before it was.
    """
    state, seen, rows = start, np.zeros(2, int), set()
    while not np.any(state.done):
        state, output, _ = step(half, mode, state)
        for b in range(2):
            chosen_by = plain[1][b, seen[b] - 1] if seen[b] else None
            assert same_bits(
                output.margin[b], start.margin[b] if chosen_by is None else gap(chosen_by)
            )
        rows |= set(output.accepted.tolist())
        seen += output.emitted
    assert rows >= {0, 1, 2}


def after_five_rounds(model, mode, state):
    for _ in range(5):
        state, *_ = step(model, mode, state)
    return state


@speculative_modes
def test_committed_state_is_that_of_plain_decoding(mode, half, start, plain):
    state, config = after_five_rounds(half, mode, start), half.config
    steps = state.cache.position - start.cache.position
    for b in range(2):
        mine, reference = (committed(s.cache, config) for s in (state, plain[2][steps[b]]))
        for name in reference:
            assert name == "drafter" or same_bits(mine[name][b], reference[name][b]), name


def test_both_modes_leave_the_same_to_the_drafter(half, start):
    """In its rings, which plain decoding leaves alone."""
    one, other = (
        committed(after_five_rounds(half, mode, start).cache, half.config)["drafter"]
        for mode in ("block", "sequential")
    )
    assert same_bits(one, other)


def test_sequential_forwards_no_position_that_is_not_committed(model, half, start, plain):
    """Every slot of the main model's caches, not only the committed ones, is as plain decoding
    leaves it; block verification differs.
    """
    states = {mode: step(half, mode, start)[0] for mode in ("sequential", "block")}
    for b in range(2):
        advance = int(states["sequential"].cache.position[b] - start.cache.position[b])
        assert (
            advance == int(states["block"].cache.position[b] - start.cache.position[b]) < BLOCK + 1
        )
        same = {
            mode: [
                same_bits(x[:, b], y[:, b])
                for x, y in zip(
                    jax.tree.leaves(state.cache.layers),
                    jax.tree.leaves(plain[2][advance].cache.layers),
                )
            ]
            for mode, state in states.items()
        }
        assert all(same["sequential"]) and not any(same["block"][:1])


@pytest.mark.parametrize("n", range(BLOCK + 1))
def test_block_sends_the_chosen_rows_and_no_more(model, start, n):
    """The chosen length counts what is computed: slots written in the first layer's window, n + 1
    of each stream.
    """
    costs = dict(
        enabled=True, margin=1.0, draft_ms=0, verify_base_ms=1, plain_ms=1e-3 if n == 0 else 1e6
    )
    gate = dspark.GateConfig(min_draft=n, verify_slope_ms=1000, **costs)
    state, output, _ = step(model, "block", start, gate)
    assert output.verified.tolist() == [n, n] and output.skipped.tolist() == [int(n == 0)] * 2
    before, after = (s.cache.layers[0][0].window[0] for s in (start, state))
    written = (before != after).any(axis=-1)
    for b, position in enumerate(start.cache.position):
        assert np.flatnonzero(written[b]).tolist() == sorted(
            (position + i) % before.shape[1] for i in range(n + 1)
        )


@speculative_modes
def test_margin_skips_one_stream_and_not_the_other(model, start, plain, mode):
    margins = start.margin
    gate = dspark.GateConfig(enabled=True, margin_threshold=float(margins.mean()), plain_ms=1e6)
    low = int(np.argmin(margins))
    state, output, _ = step(model, mode, start, gate)
    skipped = np.arange(2) == low
    assert output.skipped.tolist() == np.where(skipped, MARGIN_SKIP, NOT_SKIPPED).tolist()
    assert (
        output.proposed.tolist() == np.where(skipped, 0, BLOCK).tolist()
        and output.verified[low] == 0
    )
    assert output.verified[1 - low] > 0 and output.emitted[low] == 1
    assert output.tokens[:, 0].tolist() == plain[0][:, 0].tolist()
    assert same_bits(output.margin, margins)
    assert (
        state.gate.margin_skipped.tolist()
        == state.gate.skipped.tolist()
        == skipped.astype(int).tolist()
    )


@speculative_modes
def test_nothing_is_drafted_when_all_streams_skip(model, start, mode):
    gate = dspark.GateConfig(enabled=True, margin_threshold=1e6)
    _, output, _ = step(model, mode, start, gate)
    assert output.skipped.tolist() == [MARGIN_SKIP] * 2 and output.emitted.tolist() == [1, 1]
    assert not output.confidence.any(), "no draft, no scores"
    assert step(model, mode, start, OFF)[1].confidence.all()


@modes
def test_a_done_stream_rests(model, start, mode):
    state, output, _ = step(model, mode, start.replace(done=np.array([True, False])))
    assert (
        output.emitted[0] == 0 < output.emitted[1]
        and output.verified[0] == output.accepted[0] == output.proposed[0] == 0
    )
    for name in ("anchor", "margin", "remaining"):
        assert same_bits(getattr(state, name)[0], getattr(start, name)[0])
        assert not same_bits(getattr(state, name)[1], getattr(start, name)[1])
    assert all(same_bits(x[0], y[0]) for x, y in zip(state.gate, start.gate))
    leaves = zip(
        jax.tree.leaves((state.cache.layers, state.cache.drafter)),
        jax.tree.leaves((start.cache.layers, start.cache.drafter)),
    )
    assert all(same_bits(x[:, 0], y[:, 0]) for x, y in leaves)
    assert state.cache.position[0] == start.cache.position[0]


def test_plain_leaves_the_drafters_rings_alone(start, plain):
    assert same_bits(plain[2][9].cache.drafter.rings, start.cache.drafter.rings)


@modes
def test_the_end_of_a_stream(model, oracle, start, plain, mode):
    """A stop token or the wanted length within what a round emits ends the stream, and its cache
    before the last token that is kept; the round says what it computed.
    """
    emits = 1 if mode == "plain" else BLOCK + 1
    for index in range(emits):
        stops = NO_STOPS.copy()
        stops[0, 3] = plain[0][0, index]
        assert stops[0, 3] not in plain[0][0, :index]
        state, output, _ = step(oracle, mode, start, OFF, stops)
        assert (output.emitted[0], output.kept[0], output.last[0]) == (emits, index + 1, True)
        assert state.done[0]
        assert state.cache.position[0] == start.cache.position[0] + index + 1
        remaining = np.array([index + 1, LENGTH], np.int32)
        state, output, _ = step(oracle, mode, start.replace(remaining=remaining))
        assert (output.emitted[0], output.kept[0], output.last[0]) == (emits, index + 1, True)
        assert state.done.tolist() == [True, False] and not output.last[1]
        assert state.cache.position.tolist() == (start.cache.position + output.kept).tolist()
    remaining = np.array([BLOCK + 2, LENGTH], np.int32)
    state, output, _ = step(oracle, mode, start.replace(remaining=remaining))
    assert state.done.tolist() == output.last.tolist() == [False, False]
    assert output.kept.tolist() == output.emitted.tolist()
    assert state.remaining.tolist() == (remaining - output.kept).tolist()


def test_where_a_stream_ends():
    """Against a loop: every number emitted and wanted, stop tokens anywhere or nowhere."""
    rng, rows = np.random.default_rng(2), 2000
    tokens = rng.integers(0, 12, (rows, BLOCK + 1)).astype(np.int32)
    emitted, remaining = rng.integers(0, BLOCK + 2, (2, rows)).astype(np.int32)
    stop_ids = rng.choice(np.array([3, 7, -1], np.int32), (rows, 4))
    kept, last = rounds.kept_tokens(tokens, emitted, remaining, stop_ids)
    for b in range(rows):
        count, ended = 0, remaining[b] == 0
        while count < emitted[b] and not ended:
            ended = tokens[b, count] in stop_ids[b] or count + 1 == remaining[b]
            count += 1
        assert (int(kept[b]), bool(last[b])) == (count, ended)


@speculative_modes
def test_no_row_beyond_the_end_of_the_cache(model, start, mode):
    """As many drafts as fit are verified and counted. (The keys before such a position are not
    those of its tokens; they need not be.)
    """
    for room in range(1, BLOCK + 3):
        position = model.limits.max_seq_len - np.array([room, 50])
        state, output, _ = step(
            model,
            mode,
            start.replace(cache=start.cache.replace(position=position.astype(np.int32))),
        )
        assert output.verified.tolist() == [min(room - 1, BLOCK), BLOCK]
        assert state.gate.truncated.tolist() == state.gate.skipped.tolist() == [
            0,
            0,
        ] and state.gate.rounds.tolist() == [1, 1]
        assert state.cache.position.tolist() == (position + output.accepted + 1).tolist()
        assert state.cache.position[0] <= model.limits.max_seq_len


@modes
def test_a_fault_is_of_one_stream(model, prompts, start, plain, mode):
    """Stream 0's anchor has a NaN embedding: its position is named, its token is not emitted, and
    stream 1 goes on with the same bits.
    """
    anchor = int(start.anchor[0])
    assert anchor not in (*prompts[1], int(start.anchor[1]), int(plain[0][1, 0]))
    damaged = scripted(model, nan_tokens=[anchor])
    state, output, logits = step(damaged, mode, start)
    assert state.faulty.tolist() == [len(prompts[0]), -1] and state.done.tolist() == [True, False]
    assert output.emitted[0] == 0 < output.emitted[1]
    assert same_bits(logits[1, 0], plain[1][1, 0])
