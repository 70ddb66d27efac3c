"""The gate against a reference written as plain loops in float64, and the rules that a loop is too
easy to get wrong in.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import gate

ON = gate.GateConfig(enabled=True)
EDGES = [-np.inf, -0.5, 0.5, 1.5, 3.0, 6.0, np.inf]


def bucket_of(score):
    for i in range(6):
        if EDGES[i] <= score < EDGES[i + 1]:
            return i
    return 5  # +inf


class Reference:
    """One stream of the gate, in Python floats."""

    def __init__(self, config):
        self.config = config
        self.matches, self.observed = [0.0] * 6, [0.0] * 6
        self.rounds = self.truncated = self.skipped = self.margin_skipped = 0

    def choose(self, conf):
        c, block = self.config, len(conf)
        if not c.enabled:
            return block
        rates = []
        for n in range(block + 1):
            tokens = 1.0
            for i in range(1, n + 1):
                product = 1.0
                for score in conf[:i]:
                    b = bucket_of(score)
                    product *= (self.matches[b] + 1.5) / (self.observed[b] + 2)
                tokens += product
            rates.append(
                tokens
                / (c.draft_ms + c.verify_base_ms + c.verify_slope_ms * n if n else c.plain_ms)
            )
        best = max(range(block + 1), key=lambda n: (rates[n], -n))
        if best != block and rates[best] < c.margin * rates[block]:
            best = block
        return c.min_draft if 0 < best < c.min_draft else best

    def observe(self, conf, accepted, verified):
        if not verified:
            return
        self.matches = [x * self.config.decay for x in self.matches]
        self.observed = [x * self.config.decay for x in self.observed]
        for i, score in enumerate(conf):
            if i <= min(accepted, verified - 1):
                self.observed[bucket_of(score)] += 1
                self.matches[bucket_of(score)] += i < accepted
        self.rounds += 1
        self.truncated += 0 < verified < len(conf)

    def skip(self, by_margin):
        self.rounds += 1
        self.skipped += 1
        self.margin_skipped += by_margin


def state_with(matches, observed, batch=1):
    """A state whose buckets hold the given counts, the same in every stream."""
    wide = [jnp.tile(jnp.asarray(row, jnp.float32), (batch, 1)) for row in (matches, observed)]
    return gate.init(ON, batch)._replace(matches=wide[0], observed=wide[1])


def drive(config, rounds, block, batch, seed):
    """Runs `rounds` random rounds through gate and reference; checks every choice; returns (gate
    state, references).
    """
    rng = np.random.default_rng(seed)
    state, references = gate.init(config, batch), [Reference(config) for _ in range(batch)]
    for _ in range(rounds):
        conf = rng.normal(0.5, 2.5, (batch, block)).astype(np.float32)
        by_margin = rng.random(batch) < 0.1
        n = np.array(gate.choose(config, state, conf))
        assert n.tolist() == [r.choose(row) for r, row in zip(references, conf.astype(float))]
        n[by_margin] = 0
        right = rng.random((batch, block)) < 1 / (
            1 + np.exp(-conf)
        )  # scores that mean what they say
        accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), n)
        state = gate.observe(config, state, conf, accepted, n)
        state = gate.note_skipped(state, n == 0, by_margin)
        for b, reference in enumerate(references):
            reference.observe(conf[b].astype(float), accepted[b], n[b])
            if n[b] == 0:
                reference.skip(by_margin[b])
    return state, references


@pytest.mark.parametrize("block", [1, 5, 8])
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"margin": 1.0, "min_draft": 3, "plain_ms": 331},
        {"draft_ms": 20, "decay": 0.5, "margin": 0.9},
    ],
)
def test_random_rounds_equal_the_loop_reference(numbers, block):
    config = dataclasses.replace(ON, **numbers)
    config = dataclasses.replace(config, min_draft=min(config.min_draft, block))
    state, references = drive(config, rounds=60, block=block, batch=3, seed=block)
    for name in ("rounds", "truncated", "skipped", "margin_skipped"):
        assert getattr(state, name).tolist() == [getattr(r, name) for r in references], name
    assert (
        state.matches.dtype == state.observed.dtype == jnp.float32
        and state.rounds.dtype == jnp.int32
    )
    np.testing.assert_allclose(state.matches, [r.matches for r in references], rtol=1e-5)
    np.testing.assert_allclose(state.observed, [r.observed for r in references], rtol=1e-5)


def test_scaled_scores_through_the_gate_equal_the_loop_reference():
    """Temperatures and offsets of each position, in float64 by loops on one side."""
    temperatures, offsets = [0.5, 1.5, 2.0, 3.0, 1.25], [-0.5, 0.25, 0.0, 1.0, -0.125]
    config = dataclasses.replace(ON, margin=1.0, draft_ms=20)
    rng = np.random.default_rng(9)
    state, reference, chosen = gate.init(config, 1), Reference(config), []
    for _ in range(60):
        conf = rng.normal(0.5, 2.5, 5).astype(np.float32)
        scores = gate.scaled(conf[None], temperatures, offsets)
        by_hand = [s / t + o for s, t, o in zip(conf.tolist(), temperatures, offsets)]
        assert scores.dtype == jnp.float32
        np.testing.assert_allclose(scores[0], by_hand, rtol=1e-6, atol=1e-6)
        n = gate.choose(config, state, scores)
        assert int(n[0]) == reference.choose(by_hand)
        accepted = min(int(rng.integers(0, 6)), int(n[0]))
        state = gate.observe(config, state, scores, [accepted], n)
        reference.observe(by_hand, accepted, int(n[0]))
        chosen.append(int(n[0]))
    np.testing.assert_allclose(state.matches[0], reference.matches, rtol=1e-5)
    assert len(set(chosen)) > 2


def test_a_scale_of_ones_and_zeros_changes_no_bit():
    conf = np.random.default_rng(10).normal(0, 9, (7, 5)).astype(np.float32)
    conf[0] = [np.inf, -np.inf, np.nan, 1e-37, -3e38]
    assert np.asarray(gate.scaled(conf, [1.0] * 5, [0.0] * 5)).tobytes() == conf.tobytes()


def test_the_random_rounds_reach_every_kind_of_choice():
    state, _ = drive(ON, rounds=60, block=5, batch=3, seed=5)
    full = state.rounds - state.truncated - state.skipped
    assert (
        min(
            full.sum(),
            state.truncated.sum(),
            (state.skipped - state.margin_skipped).sum(),
            state.margin_skipped.sum(),
        )
        > 0
    )


def test_off_means_the_whole_block():
    state = state_with([0] * 6, [50] * 6, batch=2)
    assert gate.choose(gate.GateConfig(), state, jnp.full((2, 5), -9.0)).tolist() == [5, 5]
    assert gate.choose(ON, state, jnp.full((2, 5), -9.0)).tolist() == [0, 0]


def test_a_cold_gate_expects_three_drafts_in_four_to_match():
    # E(5) = 1 + 3/4 + ... + (3/4)^5 = 3.288, and 1.15 * 303 ms * 3.288 = 1145.7 ms = 845 ms of
    # verify + 300.7 ms of draft.
    state = gate.init(ON, 1)
    assert gate.choose(ON, state, jnp.zeros((1, 5))).tolist() == [5]
    assert gate.choose(
        dataclasses.replace(ON, draft_ms=300), state, jnp.zeros((1, 5))
    ).tolist() == [5]
    assert gate.choose(
        dataclasses.replace(ON, draft_ms=301), state, jnp.zeros((1, 5))
    ).tolist() == [0]


@pytest.mark.parametrize(
    "score, bucket",
    [
        (-99, 0),
        (-0.5001, 0),
        (-0.5, 1),
        (0.4999, 1),
        (0.5, 2),
        (1.5, 3),
        (2.9999, 3),
        (3, 4),
        (5.9999, 4),
        (6, 5),
        (99, 5),
    ],
)
def test_a_bucket_holds_its_lower_edge_only(score, bucket):
    state = gate.observe(ON, gate.init(ON, 1), [[float(score)]], [1], [1])
    assert (
        state.observed[0].tolist()
        == state.matches[0].tolist()
        == [float(i == bucket) for i in range(6)]
    )


def test_a_tie_goes_to_the_smaller_n():
    # p = 3/4: E = 1, 7/4, 37/16. The costs are chosen so that the rates of 0, 1 and 2 are exactly
    # equal.
    state = gate.init(ON, 1)
    equal = dataclasses.replace(
        ON, margin=1.0, plain_ms=16, draft_ms=19, verify_base_ms=0, verify_slope_ms=9
    )
    assert gate.choose(equal, state, jnp.zeros((1, 2))).tolist() == [0]
    assert gate.choose(
        dataclasses.replace(equal, plain_ms=17), state, jnp.zeros((1, 2))
    ).tolist() == [1]
    assert gate.choose(
        dataclasses.replace(equal, plain_ms=17, draft_ms=18), state, jnp.zeros((1, 2))
    ).tolist() == [1]
    assert gate.choose(
        dataclasses.replace(equal, plain_ms=17, draft_ms=20), state, jnp.zeros((1, 2))
    ).tolist() == [2]


def test_a_tie_survives_decimal_costs():
    # E(0) = 1 and E(1) = 1.75: the rates are equal at cost(1) = 1.75 cost(0), whatever a division
    # would round to.
    for ms in range(1, 400):
        config = dataclasses.replace(
            ON, margin=1.0, plain_ms=4 * ms, draft_ms=7 * ms, verify_base_ms=0, verify_slope_ms=0
        )
        assert gate.choose(config, gate.init(config, 1), jnp.zeros((1, 1))).tolist() == [0], ms


def test_a_truncated_block_must_win_by_the_margin_and_exactly_the_margin_is_enough():
    # rate(0) = 1/plain, rate(1) = 1.75/700 = 1/400: plain 320 is exactly 1.25 times better.
    config = dataclasses.replace(
        ON, margin=1.25, draft_ms=500, verify_base_ms=100, verify_slope_ms=100
    )
    state, score = gate.init(ON, 1), jnp.zeros((1, 1))
    assert gate.choose(dataclasses.replace(config, plain_ms=320), state, score).tolist() == [0]
    assert gate.choose(dataclasses.replace(config, plain_ms=321), state, score).tolist() == [1]


@pytest.mark.parametrize("min_draft, expected", [(0, 1), (1, 1), (2, 2), (3, 3), (4, 4)])
def test_min_draft_raises_a_short_choice(min_draft, expected):
    # The first draft is nearly sure, the others nearly hopeless: n* = 1.
    state = state_with([0, 0, 0, 0, 0, 99], [99, 0, 0, 0, 0, 99])
    config = dataclasses.replace(ON, min_draft=min_draft, draft_ms=20)
    assert gate.choose(config, state, [[9.0, -9.0, -9.0, -9.0]]).tolist() == [expected]


def test_min_draft_leaves_zero_alone():
    config = dataclasses.replace(ON, min_draft=3)
    assert gate.choose(config, state_with([0] * 6, [99] * 6), jnp.zeros((1, 5))).tolist() == [0]


def test_what_lies_after_the_first_rejection_is_censored():
    conf = [[-9.0, 0.0, 1.0, 2.0, 4.0, 9.0]]  # one draft per bucket
    for verified in range(1, 7):
        for accepted in range(verified + 1):
            state = gate.observe(ON, gate.init(ON, 1), conf, [accepted], [verified])
            seen = min(accepted + 1, verified)
            assert state.observed[0].tolist() == [1.0] * seen + [0.0] * (6 - seen)
            assert state.matches[0].tolist() == [1.0] * accepted + [0.0] * (6 - accepted)
            assert (int(state.rounds[0]), int(state.truncated[0])) == (1, int(verified < 6))


def test_what_the_cache_cut_short_is_learned_from_and_not_counted_as_truncated():
    """The gate chose all of them; the end of the cache had room for two, then for none."""
    state = gate.observe(ON, gate.init(ON, 1), jnp.zeros((1, 5)), [2], [2], chosen=[5])
    assert state.observed[0].tolist() == state.matches[0].tolist() == [0, 2, 0, 0, 0, 0]
    after = gate.observe(ON, state, jnp.zeros((1, 5)), [0], [0], chosen=[5])
    assert (
        after.observed.tolist() == state.observed.tolist()
        and after.matches.tolist() == state.matches.tolist()
    )
    assert (after.rounds.tolist(), after.truncated.tolist(), after.skipped.tolist()) == (
        [2],
        [0],
        [0],
    )
    assert gate.observe(ON, state, jnp.zeros((1, 5)), [1], [1], chosen=[4]).truncated.tolist() == [
        1
    ]


def test_decay_comes_before_what_is_added_and_touches_all_buckets():
    state = gate.observe(
        dataclasses.replace(ON, decay=0.5), state_with([4] * 6, [8] * 6), [[-9.0, -9.0]], [1], [2]
    )
    assert state.matches[0].tolist() == [3, 2, 2, 2, 2, 2]
    assert state.observed[0].tolist() == [6, 4, 4, 4, 4, 4]


def test_a_skipped_round_observes_and_decays_nothing():
    before = state_with([4] * 6, [8] * 6, batch=3)
    state = gate.observe(ON, before, jnp.zeros((3, 5)), [0, 0, 0], [0, 0, 0])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, state))
    state = gate.note_skipped(state, [True, True, False], [True, False, True])
    assert (
        state.matches.tolist() == before.matches.tolist()
        and state.observed.tolist() == before.observed.tolist()
    )
    assert state.rounds.tolist() == [1, 1, 0] and state.skipped.tolist() == [1, 1, 0]
    assert state.margin_skipped.tolist() == [1, 0, 0] and state.truncated.tolist() == [0, 0, 0]


def test_learning_from_a_round_is_observing_it_and_noting_what_was_skipped():
    """A whole block, a truncated one, one cut short by the cache, a skip for either reason, and a
    stream that is done; bit for bit.
    """
    rows = [(3, 5, 5, 0, 0), (2, 2, 2, 0, 0), (1, 1, 5, 0, 0), (0, 0, 5, 0, 0)]
    rows += [(0, 0, 0, 1, 0), (0, 0, 0, 1, 1), (0, 0, 0, 0, 0)]
    accepted, verified, chosen, skipped, by_margin = map(np.array, zip(*rows))
    skipped, by_margin = skipped.astype(bool), by_margin.astype(bool)
    conf = np.random.default_rng(8).normal(0, 3, (len(rows), 5)).astype(np.float32)
    before = state_with([2.5] * 6, [4.25] * 6, batch=len(rows))
    after = gate.learn(
        ON, before, gate.Outcome(conf, accepted, verified, chosen, skipped, by_margin)
    )
    apart = gate.observe(ON, before, conf, accepted, verified, chosen)
    apart = gate.note_skipped(apart, skipped, by_margin)
    for a, b in zip(after, apart):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert after.rounds.tolist() == [1] * 6 + [0]
    assert after.truncated.tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert after.skipped.tolist() == [0, 0, 0, 0, 1, 1, 0]
    assert after.margin_skipped.tolist() == [0, 0, 0, 0, 0, 1, 0]


def test_what_a_round_costs():
    config = gate.GateConfig(draft_ms=7, verify_base_ms=20, verify_slope_ms=3, plain_ms=11)
    assert [gate.round_ms(config, n) for n in range(4)] == [11, 30, 33, 36]
    assert [gate.verify_ms(config, n) for n in (1, 3)] == [23, 29]


@pytest.mark.parametrize(
    "config, skipped",
    [
        (gate.GateConfig(margin_threshold=1.0), [False] * 5),
        (dataclasses.replace(ON, margin_threshold=0.0), [False] * 5),
        (dataclasses.replace(ON, margin_threshold=1.0), [True, True, False, False, False]),
    ],
)
def test_margin_skip_needs_the_gate_a_threshold_and_a_smaller_margin(config, skipped):
    assert (
        gate.margin_skip(config, jnp.asarray([-1.0, 0.99, 1.0, 1.01, jnp.nan])).tolist() == skipped
    )


def test_a_batch_equals_its_solo_streams_bit_for_bit():
    rng = np.random.default_rng(3)
    rounds = [
        (rng.normal(0, 3, (4, 5)).astype(np.float32), rng.integers(0, 6, 4)) for _ in range(40)
    ]

    def play(streams):
        state, chosen = gate.init(ON, len(streams)), []
        for conf, accept in rounds:
            n = gate.choose(ON, state, conf[streams])
            state = gate.observe(ON, state, conf[streams], jnp.minimum(accept[streams], n), n)
            state = gate.note_skipped(state, n == 0, jnp.zeros(len(streams), bool))
            chosen.append(n)
        return jax.tree.map(np.asarray, (state, jnp.stack(chosen, axis=1)))

    batch = play([0, 1, 2, 3])
    solos = [play([b]) for b in range(4)]
    for whole, parts in zip(jax.tree.leaves(batch), zip(*map(jax.tree.leaves, solos))):
        assert whole.tobytes() == np.concatenate(parts).tobytes()


def test_inside_jit_the_bits_are_those_outside_and_a_new_number_compiles_nothing():
    traces = []

    @jax.jit
    def round_of(config, state, conf, accept):
        traces.append(1)
        n = gate.choose(config, state, conf)
        state = gate.observe(config, state, conf, jnp.minimum(accept, n), n)
        return n, gate.note_skipped(state, n == 0, gate.margin_skip(config, conf[:, 0]))

    rng = np.random.default_rng(4)
    configs = [
        ON,
        dataclasses.replace(ON, margin=2, decay=1, draft_ms=7, plain_ms=300.5),
        dataclasses.replace(
            ON,
            min_draft=3,
            margin_threshold=1,
            verify_base_ms=np.float64(10),
            verify_slope_ms=np.int64(3),
        ),
        gate.GateConfig(),
    ]
    for config in configs:
        inside = outside = gate.init(config, 2)
        for _ in range(10):
            conf, accept = (
                jnp.asarray(rng.normal(0, 3, (2, 5)), jnp.float32),
                jnp.asarray(rng.integers(0, 6, 2)),
            )
            n, inside = round_of(config, inside, conf, accept)
            assert n.tolist() == gate.choose(config, outside, conf).tolist()
            outside = gate.observe(config, outside, conf, jnp.minimum(accept, n), n)
            outside = gate.note_skipped(outside, n == 0, gate.margin_skip(config, conf[:, 0]))
            for a, b in zip(inside, outside):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert len(traces) == 1


def test_stats_of_one_stream_and_of_all():
    state = gate.init(ON, 2)
    state = gate.observe(ON, state, [[9.0, 9.0], [-9.0, 9.0]], [1, 0], [2, 1])
    state = gate.note_skipped(state, [True, False], [True, False])
    one, both = gate.stats(state, stream=0), gate.stats(state)
    assert one["bucket_rates"] == [0.75] * 5 + [2.5 / 4] and one["bucket_observed"] == [
        0,
        0,
        0,
        0,
        0,
        2,
    ]
    assert both["bucket_rates"] == [0.5, 0.75, 0.75, 0.75, 0.75, 2.5 / 4]
    assert [one[k] for k in ("rounds", "truncated", "skipped", "margin_skipped")] == [2, 0, 1, 1]
    assert [both[k] for k in ("rounds", "truncated", "skipped", "margin_skipped")] == [3, 1, 1, 1]
    assert one["bucket_edges"] == [-0.5, 0.5, 1.5, 3.0, 6.0]
