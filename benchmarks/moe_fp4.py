"""One layer's routed experts at real sizes on CPU: D 4096, F 2048, 6 routes, 64 experts (one
device's share of 256).

    python benchmarks/moe_fp4.py [--experts 64] [--rows 1 6 64] [--repeats 5]
        [--skip dequantised packed einsum torch]

For each number of rows, the best time of
    dequantised   the op, backend "xla", experts held as float32 (6.4 GB at 64 experts)
    packed        the op, backend "xla", experts held as FP4 (0.9 GB)
    einsum        the active experts, dequantised and then multiplied by einsum; up to 6 rows (more
                  would take the whole layer)
    torch         transformers' DeepseekV4Experts in bfloat16 (3.2 GB), where torch and transformers
                  are installed
beside the bandwidth bound of each way of holding the experts: bytes of the active ones over the
rate of a large copy, read and written. "einsum / it" is how many times as long the einsum takes.
"extra memory" is what the packed op's program needs beside its arguments and result, in percent of
the packed table. Processor time, of all threads, stands next to wall time because the two differ on
a busy machine. Outputs are compared before anything is timed; the table comes last.

Takes 11 GB of memory and, on two idle cores, about two minutes.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WIDTH, INNER, ROUTES, LIMIT = 4096, 2048, 6, 10.0
PARAMETERS = 3 * WIDTH * INNER  # of one expert
# Of one expert.
BYTES = {
    "dequantised": 4 * PARAMETERS,
    "packed": PARAMETERS * (1 / 2 + 1 / 32),
    "torch": 2 * PARAMETERS,
}
MOST_EINSUM_ROWS = 6
SECONDS = 12.0  # after which a measurement is not repeated


def best(call, repeats):
    """(wall, processor) milliseconds, each the least of `repeats` calls, after one that does not
    count.
    """
    call()
    times, began = [], time.perf_counter()
    while len(times) < repeats and (not times or time.perf_counter() - began < SECONDS):
        wall, processor = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    return tuple(1e3 * min(column) for column in zip(*times))


def batch(rows, experts):
    rng = np.random.default_rng(rows)
    ids = np.stack([rng.permutation(experts)[:ROUTES] for _ in range(rows)]).astype(np.int32)
    x, weights = (
        rng.standard_normal((rows, WIDTH)).astype(np.float32),
        rng.random((rows, ROUTES)).astype(np.float32),
    )
    return x, ids, weights, np.ones(rows, bool)


def active_experts(rows, experts):
    return np.unique(batch(rows, experts)[1])


def copy_rate(megabytes=1024):
    """Bytes per millisecond, read plus written, of a copy that no cache holds."""
    source, target = np.ones(megabytes << 18, np.float32), np.zeros(megabytes << 18, np.float32)
    return 2 * source.nbytes / best(lambda: np.copyto(target, source), 3)[0]


def packed_experts(experts):
    import jax
    import jax.numpy as jnp

    from dspark_jax.pallas_kernels import Experts

    keys = jax.random.split(jax.random.key(0), 4)
    packed = lambda key, *shape: jax.random.bits(key, shape, jnp.uint8)
    scales = lambda key, *shape: jax.random.randint(key, shape, 117, 123, jnp.int32).astype(
        jnp.uint8
    )
    return Experts(
        packed(keys[0], experts, 2 * INNER, WIDTH // 2),
        scales(keys[1], experts, 2 * INNER, WIDTH // 32),
        packed(keys[2], experts, WIDTH, INNER // 2),
        scales(keys[3], experts, WIDTH, INNER // 32),
    )


def dequantised(packed):
    """Expert by expert, so that only the result is large."""
    import jax

    from dspark_jax.pallas_kernels import Experts, fp4

    table = jax.jit(lambda w, s: jax.lax.map(lambda ws: fp4.dequantise(*ws), (w, s)))
    return Experts(table(packed.w13, packed.s13), None, table(packed.w2, packed.s2), None)


def op(*arguments):
    """The program of the op as the library compiles it."""
    import jax

    from dspark_jax.pallas_kernels import moe_fp4
    from dspark_jax.runtime.backend import compiler_options

    function = functools.partial(moe_fp4, swiglu_limit=LIMIT, regime="decode", backend="xla")
    return jax.jit(function, compiler_options=compiler_options()).lower(*arguments).compile()


def einsum_of_active(x, routed, w13, s13, w2, s2):
    """x [T, D], routed [T, n] (a row's weight of each of the n active experts, else zero), the
    packed tables of these experts.
    """
    import jax.numpy as jnp

    from dspark_jax.pallas_kernels import fp4
    from dspark_jax.pallas_kernels.expert import gated

    dot = functools.partial(jnp.einsum, precision="highest")
    gate, up = jnp.split(dot("td,efd->tef", x, fp4.dequantise(w13, s13)), 2, axis=-1)
    return dot("tef,edf->td", gated(gate, up, routed[..., None], LIMIT), fp4.dequantise(w2, s2))


def einsum_arguments(rows, packed):
    x, ids, weights, _ = batch(rows, packed.w13.shape[0])
    active = np.unique(ids)
    routed = np.zeros((rows, len(active)), np.float32)
    np.put_along_axis(routed, np.searchsorted(active, ids), weights, axis=1)
    return x, routed, *(table[active] for table in packed)


def torch_times(options):
    """{rows: (wall, processor) ms} of transformers' experts in bfloat16, or None where it is not
    installed.
    """
    try:
        import torch
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    except ImportError as missing:
        print(f"torch: not measured ({missing}); pip install -e '.[parity]' has it")
        return None
    from types import SimpleNamespace

    sizes = dict(num_local_experts=options.experts, hidden_size=WIDTH, intermediate_size=INNER)
    config = SimpleNamespace(
        **sizes, hidden_act="silu", swiglu_limit=LIMIT, _experts_implementation="eager"
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    layer = DeepseekV4Experts(config)
    times = {}
    with torch.no_grad():
        for table in (layer.gate_up_proj, layer.down_proj):
            # The same values for every expert are as good as others.
            table.copy_(torch.randn(table.shape[1:]) * 0.02)
        for rows in options.rows:
            x, ids, weights, _ = batch(rows, options.experts)
            arguments = (
                torch.from_numpy(x).bfloat16(),
                torch.from_numpy(ids).long(),
                torch.from_numpy(weights).bfloat16(),
            )
            times[rows] = best(functools.partial(layer, *arguments), options.repeats)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.experts} "
        "experts in bfloat16",
        flush=True,
    )
    return times


def jax_times(kinds, options):
    """{kind: {rows: (wall, processor) ms}} and {rows: the packed op's extra memory in percent}."""
    import jax

    packed = packed_experts(options.experts)
    size = sum(a.nbytes for a in packed)
    print(
        f"jax {jax.__version__} on {jax.default_backend()}, packed table {size / 1e6:.0f} MB",
        flush=True,
    )
    times, extra, outputs = {kind: {} for kind in kinds}, {}, {}
    for kind in kinds:  # dequantised last: its table is large
        table = dequantised(packed) if kind == "dequantised" else packed
        most = MOST_EINSUM_ROWS if kind == "einsum" else max(options.rows)
        for rows in (rows for rows in options.rows if rows <= most):
            if kind == "einsum":
                arguments = einsum_arguments(rows, packed)
                program = jax.jit(einsum_of_active).lower(*arguments).compile()
            else:
                arguments = (*batch(rows, options.experts), table)
                program = op(*arguments)
            compare(outputs, rows, kind, program(*arguments))
            times[kind][rows] = best(
                functools.partial(finished, program, *arguments), options.repeats
            )
            if kind == "packed":
                extra[rows] = 100 * program.memory_analysis().temp_size_in_bytes / size
            print(f"  {kind}, {rows} rows: {times[kind][rows][0]:.1f} ms", flush=True)
    return times, extra


def finished(program, *arguments):
    import jax

    return jax.block_until_ready(program(*arguments))


def compare(outputs, rows, kind, y):
    """Every way must give the same numbers, to float32 rounding."""
    y = np.asarray(y, np.float64)
    first, expected = outputs.setdefault(rows, (kind, y))
    deviation = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    if not deviation < 1e-5:
        raise SystemExit(
            f"{kind} and {first}, {rows} rows: outputs differ by {deviation:.1e} (relative l2)"
        )


def report(times, extra, options, rate):
    """One line for each number of rows and way of computing."""
    print(
        "\nrows  experts  way          wall ms  processor ms  bound ms  wall / bound  "
        "einsum / it (wall, processor)  extra memory"
    )
    for rows in options.rows:
        count = len(active_experts(rows, options.experts))
        for kind in (kind for kind in times if rows in times[kind]):
            wall, processor = times[kind][rows]
            bound = BYTES[kind] * count / rate if kind in BYTES else None
            einsum = times.get("einsum", {}).get(rows)
            cells = [
                f"{rows:4}",
                f"{count:7}",
                f"{kind:11}",
                f"{wall:7.1f}",
                f"{processor:12.1f}",
                f"{bound:8.1f}" if bound else f"{'-':>8}",
                f"{wall / bound:12.1f}" if bound else f"{'-':>12}",
                f"{einsum[0] / wall:19.1f}, {einsum[1] / processor:9.1f}"
                if einsum
                else f"{'-':>30}",
                f"{extra[rows]:11.1f}%" if kind == "packed" else f"{'-':>12}",
            ]
            print("  ".join(cells))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--skip", nargs="*", default=[], choices=["dequantised", "packed", "einsum", "torch"]
    )
    options = parser.parse_args()

    rate = copy_rate()
    print(f"copy: {rate / 1e6:.1f} GB/s read plus written", flush=True)
    with_torch = None if "torch" in options.skip else torch_times(options)
    times, extra = jax_times(
        [kind for kind in ("packed", "einsum", "dequantised") if kind not in options.skip], options
    )
    times = {kind: times[kind] for kind in ("dequantised", "packed", "einsum") if kind in times}
    report({**times, **({"torch": with_torch} if with_torch else {})}, extra, options, rate)


if __name__ == "__main__":
    main()
