"""What test_mesh_streams.py runs in a process with four devices: several prompts at a time on a
mesh, each as it runs alone.

python stream_parts.py 4 streams
"""

import dataclasses
from collections import Counter

from helpers import processes
from helpers.mesh_parts import (
    collectives,
    draft_collectives,
    extend_collectives,
    load,
    rows_of_the_mesh,
    watched,
    with_head_rows,
)

# The gate of these numbers skips drafts by margin, shortens some blocks and not others.
GATE = {
    "enabled": True,
    "margin": 1.0,
    "draft_ms": 10,
    "verify_base_ms": 200,
    "verify_slope_ms": 100,
    "min_draft": 3,
    "margin_threshold": 2,
}
OPTIONS = {"max_new_tokens": 30, "mode": "block", "stop_token_ids": [240]}
ROUNDS_PER_CALL = 4


def streams() -> None:
    """Five prompts on 4x1, with two places on each row of the data axis (all run at a time, and
    three places are idle), and on 2x2, with one (three have to wait for it).
    """
    import dspark_jax as dspark
    from dspark_jax.decode import run as runs

    from helpers.support import golden_arrays

    gate, expected = dspark.GateConfig(**GATE), golden_arrays("expected_float")
    prompts = five_prompts(expected)
    runs.ROUNDS_PER_CALL = ROUNDS_PER_CALL
    model, options = load("float", 1, 1), {**OPTIONS, "gate": gate, "streams": 1}
    alone = [dspark.generate(model, prompt, **options) for prompt in prompts]
    sums = dspark.generate(model, prompts, **options).stats
    check_variety(alone)
    for sizes, a_row in (((4, 1), 2), ((2, 2), 1)):
        model, options["streams"] = load("float", *sizes), a_row
        programs = compiled_by_hand(model)
        with watched() as positions:
            out = dspark.generate(model, prompts, **options)
        check_places(positions, sizes[0], a_row, len(prompts))
        own = (
            alone
            if sizes[1] == 1
            else [dspark.generate(model, prompt, **options) for prompt in prompts]
        )
        check_each(out, alone, own)
        check_stats(out, sums, sizes[0] * a_row, same_bits=sizes[1] == 1)
        check_collectives(model, programs, *sizes, a_row)
        check_goldens(model, expected, a_row)
        check_last_vocabulary_shard(model, prompts, alone, a_row)
        check_faults(model, prompts, alone, a_row)
        check_interrupt(model, prompts, alone, options)


def five_prompts(expected) -> list[list[int]]:
    """6, 23, 41, 16 and 1 tokens: up to three chunks of 16, one of them filled exactly."""
    golden = [expected[f"p{i}.ids"].tolist() for i in range(3)]
    return [*golden, golden[1][:16], golden[2][:1]]


def check_variety(alone) -> None:
    """The prompts end at different lengths, for both reasons, after different numbers of calls; the
    gate decides differently.
    """
    reasons = [out.finish_reasons[0] for out in alone]
    assert set(reasons) == {"stop", "length"}
    assert len({len(out.tokens[0]) for out in alone}) == 3
    assert len({-(-len(out.rounds[0]) // ROUNDS_PER_CALL) for out in alone}) > 1
    records = [record for out in alone for record in out.rounds[0]]
    assert {record.skipped for record in records} == {"", "margin"} and len(
        {record.verified for record in records}
    ) == 3


def check_places(positions, rows: int, a_row: int, prompts: int) -> None:
    """Rows have streams in turn; places without a prompt never leave position 0."""
    assert {len(p) for p in positions} == {rows * a_row} and len(positions) > -(-prompts // rows)
    taken = [row * a_row + place for place in range(a_row) for row in range(rows)][:prompts]
    assert {place for place, at in enumerate(positions[-1]) if at} == set(taken)
    assert all(at == 0 for p in positions for place, at in enumerate(p) if place not in taken)


def check_each(out, alone, own) -> None:
    """Tokens and choices of the solo run on one device, and all records to the last bit of the solo
    run on this mesh (`own`).
    """
    assert out.tokens == [solo.tokens[0] for solo in alone] and out.finish_reasons == [
        solo.finish_reasons[0] for solo in alone
    ]
    assert out.rounds == [solo.rounds[0] for solo in own]
    assert choices(out.rounds) == choices([solo.rounds[0] for solo in alone])
    for together, solo in zip(out.stats["per_prompt"], own, strict=True):
        assert timeless(together) == timeless(solo.stats["per_prompt"][0])


def choices(rounds):
    return [
        [dataclasses.replace(record, confidence=None, margin=0.0) for record in records]
        for records in rounds
    ]


def check_stats(out, sums, width: int, same_bits: bool) -> None:
    """Counts are the sums of one device's. All prompts take more time than the slowest; one that
    ended early, less.
    """
    ours, theirs = timeless(out.stats), timeless(sums)
    if not same_bits:  # scores near the edge of a bucket
        ours["gate"], theirs["gate"] = (
            {key: gate[key] for key in ("rounds", "truncated", "skipped", "margin_skipped")}
            for gate in (ours["gate"], theirs["gate"])
        )
    assert ours == theirs
    seconds = [prompt["seconds"] for prompt in out.stats["per_prompt"]]
    assert out.stats["seconds"] > max(seconds) > seconds[1] and min(seconds) > 0
    assert out.stats["streams"] == width and 0 < out.stats["busy_share"] <= 1


def timeless(stats: dict) -> dict:
    of_this_run = "per_prompt", "streams", "busy_share"
    return {
        key: value
        for key, value in stats.items()
        if "second" not in key and "time" not in key and key not in of_this_run
    }


class ByHand:
    """A jitted function that is compiled once, so that the text of the program can be had."""

    def __init__(self, jitted):
        self.jitted, self.lowered, self.compiled = jitted, None, None

    def lower(self, *arguments):
        self.lowered = self.jitted.lower(*arguments)
        return self

    def compile(self):
        self.compiled = self.lowered.compile()
        return self.compiled

    def __call__(self, *arguments):
        """Arguments cut otherwise than those that it was compiled for are refused."""
        return self.compiled(*arguments)


def compiled_by_hand(model) -> dict[str, ByHand]:
    """Puts such functions in place of the model's programs: they are compiled before they run."""
    from dspark_jax.decode import engine
    from dspark_jax.decode.request import make_request

    programs = engine._programs(model, make_request(model, [0], **OPTIONS))
    programs.begin, programs.run = ByHand(programs.begin), ByHand(programs.run)
    return {"prefill": programs.begin, "rounds": programs.run}


def check_collectives(model, programs, data: int, shards: int, streams: int) -> None:
    """A chunk of one prompt and a call of rounds of `streams` on each device hold the collectives
    of the design, and no others.
    """
    block, chunk = model.config.dspark_block_size, model.limits.prefill_chunk
    found, groups = collectives(programs["prefill"].compiled.as_text())
    assert found == extend_collectives(model, 1, chunk, 1) and groups <= rows_of_the_mesh(
        data, shards
    )
    found, groups = collectives(programs["rounds"].compiled.as_text())
    count = Counter(
        {("all-reduce", "[]"): 1}
    )  # how many rounds there were, the only word between streams
    assert (
        found
        == extend_collectives(model, streams, block + 1, block + 1)
        + draft_collectives(model, streams)
        + count
    ), found
    assert len(groups - rows_of_the_mesh(data, shards)) == 1


def check_last_vocabulary_shard(model, prompts, alone, streams: int) -> None:
    """Two rows of the head change places, so that the last id of all wins where the main model
    first verifies.
    """
    import dspark_jax as dspark

    last = model.config.vocab_size - 1
    first, second = alone[0].tokens[0][:2]
    assert len({first, second, last}) == 3
    options = OPTIONS | {"max_new_tokens": 2, "streams": streams}
    out = dspark.generate(with_head_rows(model, second, last), prompts, **options)
    assert out.tokens[0] == [first, last]


def check_goldens(model, expected, streams: int) -> None:
    """Without the gate, two streams side by side emit the golden tokens in the golden rounds."""
    import dspark_jax as dspark

    prompts = [expected[f"p{i}.ids"].tolist() for i in (1, 2)]
    options = OPTIONS | {"stop_token_ids": [], "streams": streams}
    out = dspark.generate(model, prompts, **options)
    for i, tokens, records in zip((1, 2), out.tokens, out.rounds):
        assert tokens == expected[f"spec{i}.emitted"].tolist()[:30]
        assert [r.accepted for r in records] == expected[f"spec{i}.accepted"].tolist()[
            : len(records)
        ] and len(records) > 6


def check_faults(model, prompts, alone, streams: int) -> None:
    """A token makes the logits of one stream NaN: the error names its prompt and position, and the
    others run to their ends, also those that are prefilled after it in its place.
    """
    import pytest

    import dspark_jax as dspark

    options = OPTIONS | {"max_new_tokens": 12, "streams": streams}
    seen = [prompt + solo.tokens[0][:12] for prompt, solo in zip(prompts, alone)]
    for number, at in ((1, only_in(seen, 1, 0)), (2, only_in(seen, 2, len(prompts[2])))):
        position = max(at, len(prompts[number]) - 1)
        with pytest.raises(
            dspark.NumericsError,
            match=f"prompt {number}: the logits at position {position} are not finite",
        ) as caught:
            dspark.generate(with_nan_embedding(model, seen[number][at]), prompts, **options)
        sound = position + 1 - len(prompts[number])
        assert caught.value.output.tokens == [
            solo.tokens[0][: sound if i == number else 12] for i, solo in enumerate(alone)
        ]
    assert position >= len(prompts[2]), "in a round"


def only_in(streams, number: int, start: int) -> int:
    """The first position from `start` on whose token no other stream has, nor this one before."""
    others = {token for i, stream in enumerate(streams) for token in stream if i != number}
    return next(
        at
        for at in range(start, len(streams[number]))
        if streams[number][at] not in others | set(streams[number][:at])
    )


def with_nan_embedding(model, token: int):
    """A copy of the model; the array lies where it lay, so that nothing is compiled again."""
    import jax
    import numpy as np
    from flax import nnx

    module = nnx.clone(model.module)
    embed = module.main.embed
    rows = np.array(embed[...])
    rows[token] = np.nan
    embed[...] = jax.device_put(rows, embed[...].sharding)
    return dataclasses.replace(model, module=module)


def check_interrupt(model, prompts, alone, options) -> None:
    """Ctrl-C before the second call of rounds is heard of keeps what the first one emitted, of
    every stream that had a place.
    """
    import pytest

    import dspark_jax as dspark
    from dspark_jax.decode.engine import Engine

    original, width = Engine._heard, model.mesh.shape["data"] * options["streams"]
    calls = iter(range(1000))

    def heard(self, call):
        if next(calls) == 1:
            raise KeyboardInterrupt
        yield from original(self, call)

    Engine._heard = heard
    try:
        with pytest.raises(dspark.Interrupted) as caught:
            dspark.generate(model, prompts, **options)
    finally:
        Engine._heard = original
    out = caught.value.output
    assert out.finish_reasons.count("interrupted") == len(prompts) - 1, (
        "the second prompt had already ended"
    )
    for i, solo in enumerate(alone):
        records = choices(solo.rounds)[0][:ROUNDS_PER_CALL] if i < width else []
        kept = 1 + sum(record.accepted + 1 for record in records) if i < width else 0
        assert choices(out.rounds)[i] == records and out.tokens[i] == solo.tokens[0][:kept]
        assert out.finish_reasons[i] == (solo.finish_reasons[0] if i == 1 else "interrupted")
    assert out.stats["gate"]["rounds"] == sum(map(len, out.rounds))


if __name__ == "__main__":
    processes.main(streams=streams)
