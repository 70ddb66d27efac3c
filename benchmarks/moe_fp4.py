"""One layer's routed experts at real sizes on CPU: D 4096, F 2048, 6 routes, 64 experts (one device's share of 256).

    python benchmarks/moe_fp4.py [--experts 64] [--rows 1 6 64] [--repeats 5] [--skip dequantised reference torch]

For each number of rows, the best time of
    dequantised   backend "xla", experts held as float32 (6.4 GB at 64 experts)
    packed        backend "xla", experts held as FP4 (0.9 GB), with the extra memory of its program
    reference     dequantise the experts of every pair, then einsum; one row only, as it gathers 100 MB for each pair
    torch         transformers' DeepseekV4Experts in bfloat16, where torch and transformers are installed (they need not be)
beside the bandwidth bound: bytes of the experts that are active, over the rate of a large copy (bytes read plus written).
Processor time is printed next to wall time, because the two differ on a busy machine.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WIDTH, INNER, ROUTES, LIMIT = 4096, 2048, 6, 10.0


def best(call, repeats):
    """(wall, processor) milliseconds of the fastest of `repeats` calls, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    return tuple(1e3 * t for t in min(times))


def batch(rows, experts):
    rng = np.random.default_rng(rows)
    ids = np.stack([rng.permutation(experts)[:ROUTES] for _ in range(rows)]).astype(np.int32)
    return (
        rng.standard_normal((rows, WIDTH)).astype(np.float32),
        ids,
        rng.random((rows, ROUTES)).astype(np.float32),
        np.ones(rows, bool),
    )


def copy_rate(megabytes=1024):
    """Bytes per millisecond, read plus written, of a copy that no cache holds."""
    source, target = np.ones(megabytes << 18, np.float32), np.zeros(megabytes << 18, np.float32)
    return 2 * source.nbytes / best(lambda: np.copyto(target, source), 3)[0]


def packed_experts(experts):
    import jax
    import jax.numpy as jnp

    from pallas_kernels import Experts

    keys = jax.random.split(jax.random.key(0), 4)
    packed = lambda key, *shape: jax.random.bits(key, shape, jnp.uint8)
    scales = lambda key, *shape: jax.random.randint(key, shape, 117, 123, jnp.int32).astype(jnp.uint8)
    return Experts(
        packed(keys[0], experts, 2 * INNER, WIDTH // 2),
        scales(keys[1], experts, 2 * INNER, WIDTH // 32),
        packed(keys[2], experts, WIDTH, INNER // 2),
        scales(keys[3], experts, WIDTH, INNER // 32),
    )


def dequantised(packed):
    """Expert by expert, so that only the result is large."""
    import jax

    from pallas_kernels import Experts, fp4

    table = jax.jit(lambda w, s: jax.lax.map(lambda ws: fp4.dequantise(*ws), (w, s)))
    return Experts(table(packed.w13, packed.s13), None, table(packed.w2, packed.s2), None)


def measure(experts, arguments, backend, repeats):
    """((wall, processor) ms, temporary bytes of the program) of the op."""
    import jax

    from dspark_jax.platform import compiler_options
    from pallas_kernels import moe_fp4

    op = jax.jit(
        functools.partial(moe_fp4, swiglu_limit=LIMIT, regime="decode", backend=backend), compiler_options=compiler_options()
    )
    program = op.lower(*arguments, experts).compile()
    times = best(lambda: jax.block_until_ready(program(*arguments, experts)), repeats)
    return times, program.memory_analysis().temp_size_in_bytes


def torch_experts(experts, rows, repeats):
    """{rows: (wall, processor) ms} of transformers' experts in bfloat16, or None where it is not installed."""
    try:
        import torch
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    except ImportError as missing:
        print(f"torch: not measured ({missing})")
        return None
    from types import SimpleNamespace

    config = SimpleNamespace(
        num_local_experts=experts,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        hidden_act="silu",
        swiglu_limit=LIMIT,
        _experts_implementation="eager",
    )
    torch.manual_seed(0)
    layer = DeepseekV4Experts(config).to(torch.bfloat16)
    times = {}
    with torch.no_grad():
        layer.gate_up_proj.normal_(std=0.02)
        layer.down_proj.normal_(std=0.02)
        for count in rows:
            x, ids, weights, _ = batch(count, experts)
            arguments = torch.from_numpy(x).bfloat16(), torch.from_numpy(ids).long(), torch.from_numpy(weights).bfloat16()
            times[count] = best(lambda: layer(*arguments), repeats)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {experts} experts in bfloat16")
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], choices=["dequantised", "packed", "reference", "torch"])
    options = parser.parse_args()

    rate = copy_rate()
    print(f"copy: {rate / 1e6:.1f} GB/s read plus written")
    columns = {}
    if "torch" not in options.skip and (times := torch_experts(options.experts, options.rows, options.repeats)):
        columns["torch"] = times
    held = [kind for kind in ("packed", "reference", "dequantised") if kind not in options.skip]
    if held:
        columns |= jax_columns(held, options)
    active = {rows: len(np.unique(batch(rows, options.experts)[1])) for rows in options.rows}
    report(columns, active, rate)


def jax_columns(kinds, options):
    import jax

    print(f"jax {jax.__version__} on {jax.default_backend()}")
    columns = {kind: {} for kind in kinds}
    packed = packed_experts(options.experts)
    size = sum(a.nbytes for a in packed)
    for kind in kinds:
        table = dequantised(packed) if kind == "dequantised" else packed
        for rows in options.rows if kind != "reference" else [1]:
            backend = "reference" if kind == "reference" else "xla"
            columns[kind][rows], temporary = measure(table, batch(rows, options.experts), backend, options.repeats)
            print(f"{kind}, {rows} rows: temporary {temporary / 1e6:.1f} MB, {temporary / size:.1%} of the packed table")
    return columns


def report(columns, active, rate):
    parameters = 3 * WIDTH * INNER
    bytes_each = {"dequantised": 4 * parameters, "packed": parameters * (1 / 2 + 1 / 32), "torch": 2 * parameters}
    print(f"\n{'rows':>4} {'experts':>7}" + "".join(f" {kind + ' ms (cpu)':>22} {'of bound':>8}" for kind in columns))
    for rows, count in active.items():
        line = f"{rows:4} {count:7}"
        for kind, times in columns.items():
            if rows not in times:
                line += f" {'-':>22} {'-':>8}"
                continue
            wall, processor = times[rows]
            share = f"{bytes_each[kind] * count / rate / wall:.0%}" if kind in bytes_each else "-"
            line += f" {f'{wall:.1f} ({processor:.1f})':>22} {share:>8}"
        print(line)
    print("of bound: the time that the active experts' bytes take at the copy's rate, over the time taken")


if __name__ == "__main__":
    main()
