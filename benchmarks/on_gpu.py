"""Checks and times `pallas_kernels.pallas_triton` on a GPU. Run through on_gpu.sh.

--seeds N     seeds of the correctness part (default 50)
--tune        time the kernels of every candidate of CANDIDATES too
--dry-run     interpret mode and small sizes, on any machine: does the script itself work
"""

import argparse
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.pallas_kernels import Experts, oracle, pallas_triton
from dspark_jax.pallas_kernels.routing import Held

LIMIT = 10.0
# One device's share of the 256 experts of a layer.
REAL = dict(width=4096, inner=2048, experts=64, routes=6)
SMALL = dict(width=512, inner=256, experts=8, routes=4)
BLOCKS = [
    pallas_triton.DECODE,
    pallas_triton.PREFILL,
    pallas_triton.Blocks(16, 64, 256, 4, 4),
    pallas_triton.Blocks(8, 64, 256, 4, 3),
    pallas_triton.Blocks(8, 16, 128, 1, 3),
    pallas_triton.Blocks(16, 32, 512, 2, 2),
    pallas_triton.Blocks(16, 64, 64, 4, 3),
    pallas_triton.Blocks(16, 128, 128, 8, 3),
    pallas_triton.Blocks(32, 32, 128, 4, 3),
    pallas_triton.Blocks(64, 128, 64, 8, 2),
]
CANDIDATES = {
    "decode": [
        pallas_triton.Blocks(*b)
        for b in (
            (8, 64, 256, 4, 3),
            (8, 32, 256, 2, 3),
            (8, 64, 256, 4, 2),
            (8, 128, 256, 8, 2),
            (8, 64, 512, 4, 2),
        )
    ],
    "prefill": [
        pallas_triton.Blocks(*b)
        for b in (
            (64, 64, 128, 4, 3),
            (64, 64, 256, 4, 3),
            (64, 128, 128, 8, 3),
            (64, 128, 64, 4, 4),
            (32, 64, 256, 4, 3),
            (32, 64, 128, 4, 4),
            (32, 128, 128, 8, 3),
            (16, 64, 256, 4, 3),
            (128, 128, 64, 8, 3),
        )
    ],
}
ROWS = {"decode": (1, 6, 16), "prefill": (128, 512)}


def table(key, width, inner, experts, **_):
    """Random packed experts on the device; scales around 2 ** -7."""
    keys = jax.random.split(key, 4)
    packed = lambda k, *shape: jax.random.bits(k, shape, jnp.uint8)
    scales = lambda k, *shape: jax.random.randint(k, shape, 117, 123).astype(jnp.uint8)
    return Experts(
        packed(keys[0], experts, 2 * inner, width // 2),
        scales(keys[1], experts, 2 * inner, width // 32),
        packed(keys[2], experts, width, inner // 2),
        scales(keys[3], experts, width, inner // 32),
    )


def batch(rng, rows, width, experts, routes, crowded=False, **_):
    """One call's x, ids, weights, mask. crowded: every row goes to the same experts."""
    ids = np.stack([rng.permutation(experts)[:routes] for _ in range(rows)]).astype(np.int32)
    if crowded:
        ids[:] = ids[0]
    x = rng.standard_normal((rows, width)).astype(jnp.bfloat16)
    return x, ids, rng.random((rows, routes)).astype(np.float32), np.ones(rows, bool)


def check_blocks(blocks, seeds, interpret, activation_quant=False):
    """Worst errors of one choice of tile sizes, all assertions made on the way."""
    run = jax.jit(
        functools.partial(
            pallas_triton.moe_fp4_gpu,
            swiglu_limit=LIMIT,
            here=Held(0, SMALL["experts"]),
            activation_quant=activation_quant,
            regime="decode",
            blocks=blocks,
            interpret=interpret,
        )
    )
    worst = {"rounded": 0.0, "float64": 0.0, "swapped": np.inf}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        experts = host_table(seed)
        rows = 24
        x, ids, weights, mask = batch(rng, rows, crowded=seed % 5 == 4, **SMALL)
        mask[rng.integers(rows)] = False
        x[~mask] = np.nan
        y = np.asarray(run(x, ids, weights, mask, experts))
        assert np.array_equal(y, np.asarray(run(x, ids, weights, mask, experts))), (
            f"seed {seed}: a rerun differs"
        )
        turned = np.asarray(
            run(x[::-1].copy(), ids[::-1].copy(), weights[::-1].copy(), mask[::-1].copy(), experts)
        )[::-1]
        assert np.array_equal(y, turned), f"seed {seed}: a row depends on its place"
        if seed < 3:
            few = np.asarray(run(x[:3], ids[:3], weights[:3], mask[:3], experts))
            assert np.array_equal(y[:3], few), f"seed {seed}: a row depends on how many there are"
        exact, rounded = lines(seed, activation_quant, x, ids, weights, mask, experts)
        worst["rounded"] = max(worst["rounded"], oracle.error(y, rounded, mask))
        worst["float64"] = max(worst["float64"], oracle.error(y, exact, mask))
        swapped = ids.copy()
        only_first = mask & (np.arange(rows) == np.flatnonzero(mask)[0])
        swapped[only_first, 0] = (ids[only_first, 0] + 1) % SMALL["experts"]
        wrong = np.asarray(run(x, swapped, weights, mask, experts))
        worst["swapped"] = min(worst["swapped"], oracle.error(wrong, exact, only_first))
    assert worst["rounded"] < 1e-6, worst
    assert worst["float64"] < 5e-3, worst
    assert worst["swapped"] > 30 * worst["float64"], worst
    return worst


@functools.cache
def host_table(seed):
    experts = table(jax.random.key(seed), **SMALL)
    s13 = np.array(experts.s13)
    s13[:, ::7, ::3] = 0  # 2 ** -127, not zero
    s13[:, 1::7, ::5] = 129  # above the scales at which one multiplication would overflow
    return experts._replace(s13=jnp.asarray(s13))


_LINES = {}


def lines(seed, activation_quant, *arguments):
    """The float64 result without and with bfloat16 rounding."""
    key = seed, activation_quant
    if key not in _LINES:
        options = dict(swiglu_limit=LIMIT, activation_quant=activation_quant)
        _LINES[key] = tuple(
            oracle.line(*arguments, round_bf16=rounds, **options) for rounds in (False, True)
        )
    return _LINES[key]


def seconds(call, *arguments, repeats=15):
    """Median seconds of one call."""
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def copy_bandwidth(megabytes):
    """Bytes read plus written per second by a copy that is much larger than the cache."""
    source = jax.random.bits(jax.random.key(0), (megabytes << 18,), jnp.uint32)
    repeats = 10
    copies = jax.jit(lambda a: jax.lax.fori_loop(0, repeats, lambda _, b: b ^ 1, a))
    return 2 * source.nbytes * repeats / seconds(copies, source, repeats=5)


def repeated(call, loops):
    """A jitted function that runs `call(item, experts, zero)` for every item, `loops` times, on the
    device alone.

    `zero` depends on the run before, so that neither the loop nor equal calls can be optimised
    away.
    """

    @jax.jit
    def run(items, experts):
        def sweep(_, zero):
            for item in items:
                zero = call(item, experts, zero)[0, 0] * 0
            return zero

        return jax.lax.fori_loop(0, loops, sweep, jnp.float32(0))

    return run


def speed(rows, experts, size, blocks, regime, interpret, whole_too, calls=4, loops=25):
    """(seconds of the two kernels, seconds of the whole op or None, bytes of the active experts),
    means over `calls` routings.
    """
    rng = np.random.default_rng(rows)
    loops = 1 if interpret else loops
    here = Held(0, size["experts"])
    batches = [tuple(map(jnp.asarray, batch(rng, rows, **size))) for _ in range(calls)]
    options = dict(swiglu_limit=LIMIT, activation_quant=False, blocks=blocks, interpret=interpret)
    moved = np.mean([len(np.unique(b[1])) for b in batches]) * sum(a[0].nbytes for a in experts)

    prepare = jax.jit(lambda *b: pallas_triton.prepare(*b, here, False, blocks, interpret)[0])
    kernels = lambda work, experts, zero: pallas_triton.run_tiles(
        work._replace(slot_weight=work.slot_weight + zero), experts, **options
    )
    whole = lambda b, experts, zero: pallas_triton.moe_fp4_gpu(
        *b[:2], b[2] + zero, b[3], experts, here=here, regime=regime, **options
    )
    time_of = lambda call, items: seconds(repeated(call, loops), items, experts) / (calls * loops)
    return (
        time_of(kernels, [prepare(*b) for b in batches]),
        time_of(whole, batches) if whole_too else None,
        moved,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    platform = jax.default_backend()
    if platform != "gpu" and not options.dry_run:
        sys.exit(f"on_gpu: JAX sees {platform!r}, not a GPU; --dry-run tries the script anywhere")
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")

    report, failed = [], False
    for blocks, quant in [
        (pallas_triton.DECODE, True),
        *((b, False) for b in (BLOCKS[:2] if options.dry_run else BLOCKS)),
    ]:
        start = time.perf_counter()
        try:
            worst = check_blocks(blocks, options.seeds, options.dry_run, quant)
            result = f"{worst['rounded']:.1e}  {worst['float64']:.1e}  {worst['swapped']:.1e}"
        except AssertionError as problem:
            result, failed = f"FAILED: {problem}", True
        report.append(f"{name(blocks)} {result}{'  quantised' * quant}")
        print(report[-1], f" {time.perf_counter() - start:.1f} s")

    size = SMALL if options.dry_run else REAL
    experts = table(jax.random.key(0), **size)
    bandwidth = copy_bandwidth(1 if options.dry_run else 2048)
    speeds = []
    chosen = {"decode": pallas_triton.DECODE, "prefill": pallas_triton.PREFILL}
    trials = [
        (regime, blocks, rows)
        for regime in list(CANDIDATES) * options.tune
        for blocks in CANDIDATES[regime]
        for rows in ROWS[regime]
    ]
    final = [(regime, blocks, rows) for regime, blocks in chosen.items() for rows in ROWS[regime]]
    for number, (regime, blocks, rows) in enumerate(trials + final):
        start = time.perf_counter()
        fitted = pallas_triton.blocks_for(regime, experts, blocks)
        times = speed(
            rows,
            experts,
            size,
            fitted,
            regime,
            options.dry_run,
            number >= len(trials),
            calls=4 if regime == "decode" else 1,
        )
        speeds.append(speed_line(fitted, rows, bandwidth, *times))
        print(speeds[-1], f" {time.perf_counter() - start:.1f} s")

    print(
        "\ncorrectness: relative l2 against float64 with the kernel's roundings, without; with "
        "one expert swapped"
    )
    print(f"{'tile,n,k,warps,stages':24} rounded  float64  swapped", *report, sep="\n")
    print(f"\nspeed: {size}; copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    print(
        f"{'tile,n,k,warps,stages':24} rows       MB  kernels us  share   whole us  share",
        *speeds,
        sep="\n",
    )
    sys.exit(failed)


def name(blocks):
    return f"{tuple(blocks)!s:24}"


def speed_line(blocks, rows, bandwidth, kernels, whole, moved):
    times = "".join(f" {t * 1e6:10.1f} {moved / t / bandwidth:6.0%}" for t in (kernels, whole) if t)
    return f"{name(blocks)} {rows:4} {moved / 1e6:8.1f} {times}"


if __name__ == "__main__":
    main()
