"""The schedule of tiles against a plain loop, by both ways of ranking pairs; gradients of the op;
refusals.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BACKENDS, LIMIT, compiler, dequantised, make_call, routes, run

from dspark_jax.pallas_kernels import Experts, moe_fp4, routing

from helpers.quick import quick_jit


def plain_schedule(ids, mask, first_expert, experts, tile):
    """(expert, pairs) of every tile, by a loop over experts and pairs in order."""
    pairs = [
        (e, p)
        for e in range(experts)
        for p in range(ids.size)
        if mask[p // ids.shape[1]] and ids.flat[p] - first_expert == e
    ]
    tiles = []
    for expert in range(experts):
        mine = [p for e, p in pairs if e == expert]
        tiles += [(expert, mine[i : i + tile]) for i in range(0, len(mine), tile)]
    return tiles


@pytest.mark.parametrize("largest_comparison", [0, 10**6])
@pytest.mark.parametrize(
    "rows, active, experts, held, first",
    [(1, 1, 4, 4, 0), (6, 2, 8, 8, 0), (40, 3, 16, 4, 6), (30, 1, 1, 1, 0)],
)
@pytest.mark.parametrize("tile", [1, 8])
def test_schedule(monkeypatch, largest_comparison, rows, active, experts, held, first, tile):
    monkeypatch.setattr(routing, "LARGEST_COMPARISON", largest_comparison)
    ids = routes(0, rows, active, experts)
    mask = np.random.default_rng(1).random(rows) < 0.8
    plan = jax.tree.map(
        np.asarray,
        quick_jit(lambda i, m: routing.schedule(i, m, routing.Held(first, held, 2), tile))(
            ids, mask
        ),
    )
    expected = plain_schedule(ids, mask, first, held, tile)
    assert (
        plan.n_tiles
        == len(expected)
        <= routing.max_tiles(ids.size, held, tile)
        == len(plan.tile_expert)
    )
    for number, (expert, pairs) in enumerate(expected):
        assert plan.tile_expert[number] == 2 + expert  # two other experts come first in the tables
        assert plan.pair_of_slot[number][plan.slot_used[number]].tolist() == pairs
        assert plan.slot_of_pair[pairs].tolist() == [number * tile + i for i in range(len(pairs))]
    assert plan.slot_used.sum() == plan.pair_held.sum() == sum(len(pairs) for _, pairs in expected)


def test_the_bound_on_tiles_is_reached():
    ids = np.array([[0], [1], [2], [2], [2]])
    plan = routing.schedule(jnp.asarray(ids), jnp.ones(5, bool), routing.Held(0, 3), 2)
    assert int(plan.n_tiles) == routing.max_tiles(5, 3, 2) == 4


def test_gradients_equal_those_of_the_reference():
    """In x, route weights and experts, with padded rows of NaN, whose own gradient is zero."""
    call = make_call(
        3, routes(3, 20, 2, 6), held=4, width=64, inner=32, first_expert=1, padded=(4, 19)
    )
    experts = dequantised(call.experts)

    def loss(backend, regime):
        def value(x, weights, w13, w2):
            y = moe_fp4(
                x,
                call.ids,
                weights,
                call.mask,
                experts._replace(w13=w13, w2=w2),
                swiglu_limit=LIMIT,
                first_expert=1,
                backend=backend,
                regime=regime,
                activation_quant=True,
            )
            return jnp.sum(jnp.sin(y))

        return quick_jit(jax.grad(value, argnums=(0, 1, 2, 3)))

    clean = np.where(
        call.mask[:, None], call.weights, 0
    )  # the reference multiplies them by a zero cotangent
    expected = loss("reference", "decode")(
        np.where(call.mask[:, None], call.x, 0), clean, experts.w13, experts.w2
    )
    found = loss("xla", "prefill")(call.x, call.weights, experts.w13, experts.w2)
    for a, b in zip(found, expected):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b) > 0
    assert np.all(np.asarray(found[0])[~call.mask] == 0) and np.all(
        np.asarray(found[1])[~call.mask] == 0
    )


IN_MAKE_TEST = ("xla-columns", "tpu")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in IN_MAKE_TEST else pytest.mark.heavy) for n in BACKENDS],
)
def test_a_table_may_hold_more(name):
    """The experts of one layer among those of a stack: the same bits as alone, at any place."""
    call = make_call(6, routes(6, 9, 2, 6), held=4, width=64, inner=32, first_expert=1, padded=(2,))
    alone = run(name, call)
    other = make_call(7, routes(6, 9, 2, 6), held=4, width=64, inner=32).experts
    stacked = [np.concatenate([b, a, b]) for a, b in zip(call.experts, other)]
    experts = Experts(*stacked)
    if held := BACKENDS[name][1]:
        experts = held(experts)
    function = jax.jit(
        lambda offset, *call, experts: moe_fp4(
            *call,
            experts,
            swiglu_limit=LIMIT,
            first_expert=1,
            held=4,
            offset=offset,
            backend=BACKENDS[name][0],
        ),
        compiler_options=compiler(name),
    )
    assert np.array_equal(np.asarray(function(4, *call[:4], experts=experts)), alone)
    assert not np.array_equal(np.asarray(function(0, *call[:4], experts=experts)), alone)


def test_refusals():
    call = make_call(4, routes(4, 2, 1, 4), held=4, width=64, inner=32)
    with pytest.raises(ValueError, match="regime 'verify'"):
        moe_fp4(*call[:5], swiglu_limit=LIMIT, regime="verify")
    with pytest.raises(ValueError, match="backend 'cuda'"):
        moe_fp4(*call[:5], swiglu_limit=LIMIT, backend="cuda")
    with pytest.raises(ValueError, match="takes packed FP4 experts"):
        moe_fp4(*call[:4], dequantised(call.experts), swiglu_limit=LIMIT, backend="pallas_gpu")
