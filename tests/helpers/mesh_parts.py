"""What the tests of the mesh run in processes of their own, which have several CPU devices.

    python mesh_parts.py DEVICES WHAT ARGUMENTS...

Four streams advance together through one compiled program of six rows: the three golden prompts,
and the second one again.
"""

import contextlib
import copy
import dataclasses
import os
import re
from collections import Counter

from helpers import processes

PROMPTS = (0, 1, 2, 1)
DECODED = (0, 9, 24, 0)  # tokens fed after the prompt, before the golden draft case of the prompt
WIDTH = 6


def compile_quickly() -> None:
    """Without LLVM's optimisations programs compile in half the time; the deviations stay the same.
    Asks for a device.
    """
    from dspark_jax.runtime import backend

    options = {**(backend.compiler_options() or {}), "xla_backend_optimization_level": 0}
    backend.compiler_options = lambda: options


def load(mode: str, data: int, model: int):
    import dspark_jax as dspark

    from helpers.support import golden_model

    compile_quickly()
    return golden_model(
        activation_quant=mode == "reference", prefill_chunk=16, mesh=dspark.make_mesh(data, model)
    )


def streams(mode: str, sizes: str) -> None:
    """Four streams on a mesh "DATAxMODEL", in golden mode "float" or "reference": tokens, logits,
    drafts, shards, collectives.
    """
    from dspark_jax.decode import steps

    from helpers.support import golden_arrays

    data, model_devices = map(int, sizes.split("x"))
    model, expected = load(mode, data, model_devices), golden_arrays(f"expected_{mode}")
    check_placement(model, data, model_devices)
    texts, compiled = {}, {}

    def program(model, name):
        def call(*arguments):
            if name not in compiled:  # compiled by hand, to have its text
                compiled[name] = (
                    steps._compiled(model.split[0], model.mesh, name).lower(*arguments).compile()
                )
                texts[name] = compiled[name].as_text()
            return compiled[name](*arguments)

        return call

    steps._program = program
    cache = follow_goldens(model, expected, mode)
    check_drafts(model, cache, expected)
    check_collectives(model, texts, data, model_devices)
    check_last_vocabulary_shard(model, cache)


def check_placement(model, data: int, shards: int) -> None:
    """Every device holds its part of what is cut, and nothing of the others'."""
    config, main = model.config, model.module.main
    block, d, f = main.segments[0][0], config.hidden_size, config.moe_intermediate_size
    parts = {
        "embedding": (main.embed, (config.vocab_size // shards, config.hidden_size)),
        "head": (main.head, (config.vocab_size // shards, config.hidden_size)),
        "experts": (block.ffn.experts.w2, (2, config.n_routed_experts // shards, d, f)),
        "heads": (
            block.attn.wq_b,
            (2, config.num_attention_heads // shards * config.head_dim, config.q_lora_rank),
        ),
        "group columns": (
            block.attn.wo_b,
            (2, config.hidden_size, config.o_groups // shards * config.o_lora_rank),
        ),
        "router": (block.ffn.gate, (2, config.n_routed_experts, config.hidden_size)),
        "markov table": (
            model.module.drafter.markov_w2,
            (config.vocab_size, config.dspark_markov_rank),
        ),
    }
    for name, (parameter, shape) in parts.items():
        assert {s.data.shape for s in parameter[...].addressable_shards} == {shape}, name
    whole = main.draft_head()[...]
    assert {s.data.shape for s in whole.addressable_shards} == {whole.shape}
    assert (main.whole_head is None) == (shards == 1), "one device must not hold the head twice"


def follow_goldens(model, expected, mode: str):
    """Feeds the prompts and some decoded tokens, and compares what is said to each with the golden
    logits. Returns the cache.
    """
    import numpy as np

    import dspark_jax as dspark

    inputs = [
        np.concatenate([expected[f"p{p}.ids"], expected[f"p{p}.decode_ids"][:n]])
        for p, n in zip(PROMPTS, DECODED)
    ]
    cache, said = dspark.new_cache(model, len(PROMPTS)), [[] for _ in PROMPTS]
    while (counts := np.array([min(WIDTH, len(ids)) for ids in inputs])).any():
        tokens = np.zeros((len(PROMPTS), WIDTH), np.int32)
        for row, ids in zip(tokens, inputs):
            row[: min(WIDTH, len(ids))] = ids[:WIDTH]
        logits, hidden, cache = dspark.extend(model, cache, tokens, counts)
        check_shards_agree((logits, hidden, cache))
        cache = dspark.commit(cache, counts)
        for rows, got, count in zip(said, np.asarray(logits), counts):
            rows.extend(got[:count])
        inputs = [ids[count:] for ids, count in zip(inputs, counts)]
    for prompt, decoded, rows in zip(PROMPTS, DECODED, said):
        check_logits(np.array(rows), prompt, decoded, expected, mode)
    return cache


def check_logits(said, prompt: int, decoded: int, expected, mode: str) -> None:
    """Float mode: all of them. Reference mode is discontinuous: three times what other float32
    evaluations showed; choices.
    """
    import json

    import numpy as np

    from helpers.support import GOLDENS, max_error, rms

    count = len(expected[f"p{prompt}.ids"])
    parts = {"prefill_logits": said[:count], "decode_logits": said[count:]}
    for name, got in parts.items():
        golden = expected[f"p{prompt}.{name}"][: len(got)]
        if mode == "float":
            assert len(got) == 0 or max_error(got, golden) < 1e-4, name
        elif len(got):
            envelope = json.loads((GOLDENS / "envelope_reference.json").read_text())["tensors"][
                f"p{prompt}.{name}"
            ]
            assert rms(got - golden) < 3 * envelope["rms_dev"], name
    chosen = said[count - 1 :].argmax(-1)[:24]
    assert np.array_equal(chosen, expected[f"p{prompt}.decode_ids"][: len(chosen)]) and len(
        chosen
    ) == min(decoded + 1, 24)


def check_shards_agree(tree) -> None:
    """Devices that hold the same part hold the same bits of it."""
    import jax
    import numpy as np

    for leaf in jax.tree.leaves(tree):
        seen = {}
        for shard in leaf.addressable_shards:
            assert np.array_equal(
                seen.setdefault(str(shard.index), np.asarray(shard.data)), np.asarray(shard.data)
            )


def check_drafts(model, cache, expected) -> None:
    import numpy as np

    import dspark_jax as dspark

    anchors = [
        *(expected[f"d{case}.committed"][0] for case in range(3)),
        expected["p1.decode_ids"][0],
    ]
    drafts = dspark.draft(model, cache, np.array(anchors, np.int32))
    check_shards_agree(drafts)
    for case in range(3):
        assert np.array_equal(drafts.tokens[case], expected[f"d{case}.draft_ids"])


def check_collectives(model, texts: dict[str, str], data: int, shards: int) -> None:
    """The compiled text holds the collectives of the design, of these shapes and among these
    devices, and no others.
    """
    local = len(PROMPTS) // data
    for name, wanted in (
        ("extend", extend_collectives(model, local, WIDTH, WIDTH)),
        ("draft", draft_collectives(model, local)),
    ):
        found, groups = collectives(texts[name])
        assert found == wanted, (name, found)
        assert groups <= rows_of_the_mesh(data, shards), (name, groups)


def extend_collectives(model, streams: int, rows: int, said: int) -> Counter:
    """Of the main model on a device that has these streams: of `rows` rows each, and logits of
    `said` of them.
    """
    units = [kind for plan in plans(model.config) for kind in plan.unit]
    scores, logits = f"[{streams},{rows},64]", f"[{streams},{said},{model.config.vocab_size}]"
    found = Counter(
        {("all-reduce", scores): sum(kind.ratio == 4 for kind in units), ("all-gather", logits): 1}
    )
    return layer_collectives(model, streams, rows, len(units)) + (
        found if model.mesh.shape["model"] > 1 else Counter()
    )


def draft_collectives(model, streams: int) -> Counter:
    return layer_collectives(model, streams, model.config.dspark_block_size, 1)


def layer_collectives(model, streams: int, rows: int, layers: int) -> Counter:
    """Embedding, attention and experts of layers that are written out in the text; none where
    nothing is cut.
    """
    config, shards = model.config, model.mesh.shape["model"]
    channels = config.o_groups * config.o_lora_rank
    cut_blocks = channels // shards % 128 and model.numerics.activation_quant
    found = {
        ("all-reduce", f"[{streams},{rows},{config.hidden_size}]"): 2 * layers + 1,
        ("all-reduce", f"[{streams},{rows},{-(-channels // 128)}]"): layers if cut_blocks else 0,
    }
    return +Counter(found) if shards > 1 else Counter()


def rows_of_the_mesh(data: int, shards: int) -> set[str]:
    """The device groups of collectives over the model axis, in the spellings that releases of XLA
    have for them.
    """
    rows = ",".join(
        "{" + ",".join(str(row * shards + i) for i in range(shards)) + "}" for row in range(data)
    )
    return {
        "{" + rows + "}",
        f"[{data},{shards}]<=[{data * shards}]",
        f"mesh['data'={data},'model'={shards}] {{'model'}}",
    }


def plans(config):
    from dspark_jax.model.segments import segments

    return segments(config)


KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
COLLECTIVE = re.compile(
    rf"= (\S+|\(.*?\)) ({KINDS})(?:-start)?"
    r"\(.*?(?:replica_groups=(\{\{.*?\}\}|\[[\d,]+\]<=\[\d+\]|mesh\[.*?\] \{.*?\})|$)",
    re.MULTILINE,
)


def collectives(text: str) -> tuple[Counter, set[str]]:
    """(kind, shape) of every operand of every collective of a compiled program, counted; and the
    device groups there are.
    """
    found, groups = Counter(), set()
    for shapes, kind, group in COLLECTIVE.findall(text):
        found.update((kind, shape) for shape in re.findall(r"\w(\[[\d,]*\])", shapes))
        groups.add(group)
    return found, groups


def check_last_vocabulary_shard(model, cache) -> None:
    """Two rows of the head change places, so that the last id of all wins: for the main model, then
    for the drafter.
    """
    import numpy as np

    import dspark_jax as dspark

    tokens = np.full((len(PROMPTS), WIDTH), 7, np.int32)
    ones, last = np.ones(len(PROMPTS), np.int32), model.config.vocab_size - 1
    plain = np.asarray(dspark.extend(model, cache, tokens, ones)[0])[:, 0]
    swapped = with_head_rows(model, int(plain[0].argmax()), last)
    logits = np.asarray(dspark.extend(swapped, cache, tokens, ones)[0])[:, 0]
    assert plain[0].argmax() != last and logits[0].argmax() == last
    order = np.arange(last + 1)
    order[[plain[0].argmax(), last]] = order[[last, plain[0].argmax()]]
    assert np.array_equal(logits, plain[:, order])
    # A head row that points everywhere wins somewhere; after the same predecessor only its own
    # logit changes.
    token = np.full(len(PROMPTS), 7, np.int32)
    own, strong = (
        dspark.draft(m, cache, token) for m in (model, with_head_rows(model, last, last, 50.0))
    )
    assert np.array_equal(
        np.asarray(own.logits)[:, 0, :last], np.asarray(strong.logits)[:, 0, :last]
    )
    for draft in (own, strong):
        assert np.array_equal(np.asarray(draft.tokens), np.asarray(draft.logits).argmax(-1))
    assert (np.asarray(strong.tokens)[:, 0] == last).any() and not (
        np.asarray(own.tokens)[:, 0] == last
    ).any()


def with_head_rows(model, a: int, b: int, factor: float = 1.0):
    """The model with rows a and b of its head exchanged and row b scaled."""
    import jax
    import numpy as np
    from flax import nnx

    module = nnx.clone(model.module)
    for variable in (module.main.head, module.main.whole_head):
        if variable is not None:
            rows = np.array(variable[...])
            rows[[a, b]] = rows[[b, a]]
            rows[b] *= factor
            variable[...] = jax.device_put(rows, variable[...].sharding)
    return dataclasses.replace(model, module=module)


@contextlib.contextmanager
def watched():
    """Within it, devices must agree on what every call of rounds returns (choices, accepted counts,
    caches, all of it), wherever they hold the same part; yields the streams' positions after each
    call.
    """
    import numpy as np

    from dspark_jax.decode import engine

    original, positions = engine._programs, []

    class Watched:
        def __init__(self, jitted):
            self.jitted, self.lower = jitted, jitted.lower

        def __call__(self, *arguments):
            result = self.jitted(*arguments)
            check_shards_agree(result)
            positions.append(np.asarray(result[0].position).tolist())
            return result

    def programs(model, request):
        made = copy.copy(original(model, request))
        made.run = Watched(made.run)
        return made

    engine._programs = programs
    try:
        yield positions
    finally:
        engine._programs = original


def embedded(sizes: str) -> None:
    """The embedded checkpoint says the same on a mesh as on one device, in the same rounds."""
    import dspark_jax as dspark

    compile_quickly()
    meshes = None, dspark.make_mesh(*map(int, sizes.split("x")))
    models = [dspark.load(mesh=mesh, max_seq_len=128) for mesh in meshes]
    with watched() as calls:
        alone, together = (
            dspark.generate(model, "def add(a, b):", max_new_tokens=24) for model in models
        )
    assert len(calls) >= 2
    assert together.tokens == alone.tokens and together.texts == alone.texts
    rounds = [
        [(r.verified, r.accepted, r.skipped) for r in out.rounds[0]] for out in (alone, together)
    ]
    assert rounds[0] == rounds[1] and sum(accepted for _, accepted, _ in rounds[0]) > 0


def refuses() -> None:
    import pytest

    import dspark_jax as dspark

    from helpers.support import GOLDENS

    with pytest.raises(dspark.ConfigError, match="4x4 needs 16 devices; available: 4"):
        dspark.make_mesh(4, 4)
    with pytest.raises(dspark.ConfigError, match="at least 1"):
        dspark.make_mesh(0, 4)
    with pytest.raises(
        dspark.ConfigError,
        match="3 devices.*num_attention_heads is 8, o_groups is 4, index_n_heads is 8, "
        "n_routed_experts is 8, vocab_size is 256",
    ):
        dspark.load(GOLDENS, mesh=dspark.make_mesh(1, 3))
    with pytest.raises(dspark.ConfigError, match="make_mesh"):
        dspark.load(GOLDENS, mesh="1x4")
    cut = dspark.load(GOLDENS, mesh=dspark.make_mesh(2, 2), max_seq_len=128)
    with pytest.raises(dspark.ConfigError, match="3 streams do not divide over the 2 devices"):
        dspark.new_cache(cut, 3)
    whole = dspark.load(GOLDENS, max_seq_len=128)
    for model, other in ((whole, cut), (cut, whole)):
        with pytest.raises(dspark.PromptError, match="extend: this cache lies on other devices"):
            dspark.extend(model, dspark.new_cache(other), [[1]], [1])


def quantises() -> None:
    """Quantisation blocks cut at any channel give the bits of the whole: 32, 96, 128, 192 and 80
    channels a device.
    """
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    from dspark_jax.pallas_kernels.activation import act_quant, act_quant_of_part
    from dspark_jax.runtime.sharding import MODEL, make_mesh, on_mesh

    mesh, cut = make_mesh(1, 4), PartitionSpec(None, MODEL)
    for width in (32, 96, 128, 192, 80):
        x = np.random.default_rng(width).standard_normal((3, 4 * width)).astype(np.float32)
        x[0] *= np.exp(np.linspace(-9, 9, 4 * width))
        part = jax.jit(on_mesh(mesh, lambda x: act_quant_of_part(x, 128, MODEL), (cut,), cut))
        assert np.array_equal(part(x), act_quant(x, 128)), width


def process(coordinator: str, process_id: str, dies: str) -> None:
    """One of two processes: together they emit the golden tokens, of two prompts at a time (2x2)
    and of one (1x4).

    Then `dies` ends, and the other one must say so and end too.
    """
    import dspark_jax as dspark
    from dspark_jax.runtime import processes

    from helpers.support import golden_arrays

    processes.initialize(coordinator, int(process_id), 2)
    import jax

    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)
    expected = golden_arrays("expected_float")
    prompts, wanted = (
        [expected[f"p{i}.{name}"].tolist() for i in (1, 2)] for name in ("ids", "decode_ids")
    )
    length = min(map(len, wanted))
    out = dspark.generate(
        load("float", 2, 2), prompts, max_new_tokens=length, mode="block", stop_token_ids=[]
    )
    assert out.tokens == [tokens[:length] for tokens in wanted]
    model = load("float", 1, 4)
    check_placement(model, 1, 4)
    assert model.limits.decode_rows == model.config.dspark_block_size + 1
    prompt, wanted = prompts[0], wanted[0]
    out = dspark.generate(
        model, prompt, max_new_tokens=len(wanted), mode="block", stop_token_ids=[]
    )
    assert out.tokens == [wanted]
    check_fetch()
    print("the golden tokens", flush=True)
    if process_id == dies:
        os._exit(9)
    try:
        while True:
            dspark.generate(
                model, prompt, max_new_tokens=len(wanted), mode="block", stop_token_ids=[]
            )
    except dspark.DsparkError as error:
        print(error)
        processes.leave(1)


def member(coordinator: str, process_id: str, what: str) -> None:
    """One of two processes that have joined: it is killed, waits for that, or compares itself with
    the other one.
    """
    import signal
    import time

    import dspark_jax as dspark
    from dspark_jax.runtime import processes

    number = int(process_id)
    processes.initialize(coordinator, number, 2)
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stays":
        time.sleep(60)
    else:
        try:
            processes.require_same(mode=("block", "plain")[number], seed=number, prompt="the same")
        except dspark.ConfigError as error:
            print(error)


def check_fetch() -> None:
    """What lies with another process comes to the host of each."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from dspark_jax.runtime.sharding import DATA, fetch, make_mesh

    mesh, values = make_mesh(2, 2), np.arange(12.0).reshape(2, 6)
    tree = jax.device_put(
        {"streams": values, "all": values[0]},
        {
            "streams": NamedSharding(mesh, PartitionSpec(DATA)),
            "all": NamedSharding(mesh, PartitionSpec()),
        },
    )
    assert {s.data.shape for s in tree["streams"].addressable_shards} == {(1, 6)} and not tree[
        "streams"
    ].is_fully_addressable
    here = fetch(mesh, tree)
    assert np.array_equal(here["streams"], values) and np.array_equal(here["all"], values[0])


if __name__ == "__main__":
    processes.main(
        streams=streams,
        embedded=embedded,
        refuses=refuses,
        quantises=quantises,
        process=process,
        member=member,
    )
