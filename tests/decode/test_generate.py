"""generate() and stream() with activation quantisation: the same tokens whatever the drafter, the
mode and the gate.

The model is the golden one's last four layers, in `make heavy` all of it. The plain stream is the
reference. Programs are those of one stream; test_streams.py has several at a time. Drafters that a
test scripts (round_parts.py) are right, wrong or both at chosen positions.
"""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decode import engine as engines

from helpers.ask_parts import GATES
from helpers.round_parts import (
    BLOCK,
    OWN,
    byte_tokenizer,
    compilations,
    continuation,
    hostile,
    perfect,
    scripted,
    wrong,
)
from helpers.support import MAX_SEQ_LEN

generate_module = importlib.import_module(
    "dspark_jax.decode.generate"
)  # the package's attribute of that name is the function
SPECULATIVE = ("sequential", "block")


@pytest.fixture(scope="module")
def model(scripted_model):
    return scripted_model


def kinds(rounds):
    return [record.skipped for record in rounds]


ON_GOLDEN = pytest.mark.parametrize("reference_model", ["golden"], indirect=True)


@pytest.mark.heavy
@ON_GOLDEN
def test_plain_is_the_golden_stream(plain, expected_reference):
    for i in range(3):
        assert plain[i][:24] == expected_reference[f"p{i}.decode_ids"].tolist()


@pytest.mark.parametrize(
    "gate", [dspark.GateConfig(), *GATES], ids=["off", *(f"gate{i}" for i in range(len(GATES)))]
)
def test_modes_and_gates_give_the_plain_stream(model, prompts, plain, gate):
    records = []
    for mode in SPECULATIVE:
        out = dspark.generate(model, prompts, 75, mode, gate, stop_token_ids=[], streams=1)
        assert out.tokens == plain
        records.append(out.rounds)
    assert records[0] == records[1], (
        "both modes verify the same drafts, scored to the last bit alike"
    )


def test_gates_of_these_tests_choose_differently(model, prompts):
    outs = [
        dspark.generate(model, prompts, 75, "block", gate, stop_token_ids=[], streams=1)
        for gate in GATES
    ]
    rounds = [out.rounds[1] + out.rounds[2] for out in outs]
    lengths = [{record.verified for record in records} for records in rounds]
    assert (
        lengths[0] == {0, BLOCK}
        and lengths[1] >= {1, 2}
        and lengths[2] >= {0, 3, 4}
        and lengths[3] == {0, 3}
    )
    assert [set(kinds(records)) for records in rounds] == [
        {"", "gate"},
        {""},
        {"", "margin"},
        {"", "margin"},
    ]


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_scheduler_needs_fewer_rounds_than_plain(model, prompts, plain, mode):
    for i in (1, 2):
        tokens, rounds = continuation(model, prompts[i], 75, mode)
        assert tokens == plain[i] and len(rounds) < 74 / 2


@pytest.mark.heavy
@ON_GOLDEN
@pytest.mark.parametrize("mode", SPECULATIVE)
def test_rounds_are_the_golden_ones(model, prompts, mode, expected_reference):
    for i in (1, 2):
        rounds = continuation(model, prompts[i], 75, mode)[1]
        assert [r.accepted for r in rounds[:8]] == expected_reference[f"spec{i}.accepted"].tolist()


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_perfect_draft_is_accepted_whole(model, prompts, plain, mode):
    tokens, rounds = continuation(perfect(model, prompts[0], plain[0]), prompts[0], 73, mode)
    assert tokens == plain[0][:73]
    assert [r.accepted for r in rounds] == [BLOCK] * 12, (
        "60 drafts, no mismatch, every round emits block + 1"
    )


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_hostile_draft_is_rejected_whole(model, prompts, plain, mode):
    tokens, rounds = continuation(hostile(model, prompts[2], plain[2]), prompts[2], 40, mode)
    assert tokens == plain[2][:40]
    assert [(r.accepted, r.verified) for r in rounds] == [(0, BLOCK)] * 39


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_half_right_drafts(model, prompts, plain, mode):
    """Right at random positions: every accepted length occurs, and the record counts the leading
    right ones.
    """
    right = np.random.default_rng(5).random(75) < 0.75
    script = [t if ok else w for t, w, ok in zip(plain[0], wrong(plain[0], 256), right)]
    tokens, rounds = continuation(scripted(model, [*prompts[0], *script]), prompts[0], 75, mode)
    assert tokens == plain[0]
    at, expected = 0, []
    while at < 74:
        leading = (
            [*right[at + 1 : at + 1 + BLOCK], False].index(False)
            if at + BLOCK < 75
            else rounds[len(expected)].accepted
        )
        expected.append(leading)
        at += leading + 1
    assert [r.accepted for r in rounds] == expected and set(expected) >= {0, 1, 2, 3, 5}


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_stop_token_at_every_position_of_a_block(model, prompts, plain, mode):
    oracle, stream = perfect(model, prompts[1], plain[1]), plain[1]
    first_seen = [t for t in range(20) if stream[t] not in stream[:t]]
    assert {(t - 1) % 6 for t in first_seen if t} == set(range(6)), (
        "every place in a block, and the first token of all"
    )
    for t in first_seen:
        out = dspark.generate(oracle, prompts[1], 40, mode, stop_token_ids=[stream[t], 256 - 1])
        assert out.tokens == [stream[: t + 1]] and out.finish_reasons == ["stop"]
        assert len(out.rounds[0]) == -(-t // 6)
        assert all(r.accepted == BLOCK for r in out.rounds[0]), (
            "what was computed, not what was kept"
        )


@pytest.mark.parametrize("mode", ("plain", *SPECULATIVE))
def test_length_is_exact(model, prompts, plain, mode):
    oracle = perfect(model, prompts[0], plain[0])
    for own in (model, oracle):
        for length in range(1, 2 * BLOCK + 4):
            out = dspark.generate(own, prompts[0], length, mode, stop_token_ids=[])
            assert out.tokens == [plain[0][:length]] and out.finish_reasons == ["length"]
            assert out.stats["tokens"] == length
            if own is oracle and mode != "plain":
                assert [r.accepted for r in out.rounds[0]] == [BLOCK] * -(-(length - 1) // 6)


def test_default_stop_tokens_are_those_of_the_config(model, prompts, plain):
    ends = plain[0][20], plain[1][9], plain[2][15]
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_id=ends))
    cut = [next((t for t, token in enumerate(stream) if token in ends), None) for stream in plain]
    out = dspark.generate(model, prompts, 75, streams=1)
    assert out.tokens == [stream[: t + 1] for stream, t in zip(plain, cut)]
    assert out.finish_reasons == ["stop"] * 3
    assert dspark.generate(model, prompts, 75, stop_token_ids=[], streams=1).tokens == plain


@pytest.mark.parametrize("mode", ("plain", *SPECULATIVE))
def test_the_last_position_of_the_cache(model, prompts, plain, mode):
    """Prompt and output fill max_seq_len exactly. Every token must be what a prefill of all before
    it says.
    """
    prompt = (prompts[2] + plain[2])[:100]
    length = MAX_SEQ_LEN - len(prompt)
    tokens, rounds = continuation(model, prompt, length, mode)
    assert len(tokens) == length
    for i in (0, 10, 20, 25, 26, 27):
        assert continuation(model, prompt + tokens[:i], 1, mode)[0] == tokens[i : i + 1]
    for drafter in (perfect, hostile):
        again, rounds = continuation(drafter(model, prompt, tokens), prompt, length, mode)
        assert again == tokens
    with pytest.raises(
        dspark.PromptError,
        match=f"100 tokens and max_new_tokens {length + 1} together exceed max_seq_len 128",
    ):
        dspark.generate(model, prompt, length + 1, mode)


def test_rounds_at_the_end_of_the_cache_verify_what_fits(model, prompts, plain):
    prompt = (prompts[2] + plain[2])[:100]
    tokens, _ = continuation(model, prompt, 28, "plain")
    for mode in SPECULATIVE:
        _, rounds = continuation(perfect(model, prompt, tokens), prompt, 28, mode)
        # Anchors at 100, 106, ... 124; the row at 127 is the last there is.
        assert [(r.verified, r.accepted) for r in rounds[:4]] == [(5, 5)] * 4
        assert rounds[4].verified == 3 and rounds[4].accepted >= 2 and len(rounds) == 5


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize(
    "gate",
    [dspark.GateConfig(), dspark.GateConfig(enabled=True, plain_ms=1e6, min_draft=BLOCK)],
    ids=["off", "on"],
)
def test_the_end_of_the_cache_is_not_the_gates_doing(model, prompts, plain, mode, gate):
    """The cache has room for fewer and fewer drafts; the gate wanted all of them."""
    prompt = (prompts[2] + plain[2])[:100]
    tokens, _ = continuation(model, prompt, 28, "plain")
    out = dspark.generate(hostile(model, prompt, tokens), prompt, 28, mode, gate, stop_token_ids=[])
    assert [r.verified for r in out.rounds[0]] == [BLOCK] * 22 + [5, 4, 3, 2, 1] and out.tokens == [
        tokens
    ]
    counters = out.stats["gate"]
    assert (counters["rounds"], counters["truncated"], counters["skipped"]) == (27, 0, 0)
    assert kinds(out.rounds[0]) == [""] * 27


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("gate", GATES, ids=lambda g: f"threshold{g.margin_threshold}")
def test_records_replayed_through_the_gate(model, prompts, plain, mode, gate):
    """From the records alone, the gate's functions give every choice, every skip, and the state
    that the stats show.
    """
    confidence = np.random.default_rng(7).normal(2, 3, MAX_SEQ_LEN).astype(np.float32)
    out = dspark.generate(
        scripted(model, (), confidence), prompts[1], 75, mode, gate, stop_token_ids=[]
    )
    state = dspark.gate.init(gate, 1)
    for record in out.rounds[0]:
        if record.margin < gate.margin_threshold:
            assert (record.skipped, record.proposed, record.verified, record.accepted) == (
                "margin",
                0,
                0,
                0,
            )
            assert record.confidence is None
            state = dspark.gate.note_skipped(state, [True], [True])
            continue
        scores = np.array([record.confidence], np.float32)
        n = dspark.gate.choose(gate, state, scores)
        assert (record.proposed, record.verified) == (
            BLOCK,
            int(n[0]),
        ) and 0 <= record.accepted <= record.verified
        assert record.skipped == ("" if record.verified else "gate")
        state = dspark.gate.observe(gate, state, scores, [record.accepted], n)
        state = dspark.gate.note_skipped(state, n == 0, [False])
    assert out.stats["gate"] == dspark.gate.stats(state)
    assert out.tokens == [plain[1]]


def test_stats_are_counts_of_the_records(model, prompts):
    gate = GATES[3]
    out = dspark.generate(model, prompts, 30, "block", gate, stop_token_ids=[], streams=1)
    together = [record for records in out.rounds for record in records]
    for name, records in [(None, together), *enumerate(out.rounds)]:
        stats = out.stats if name is None else out.stats["per_prompt"][name]
        verified, accepted = sum(r.verified for r in records), sum(r.accepted for r in records)
        assert stats["rounds"] == len(records)
        assert (stats["proposed"], stats["verified"], stats["accepted"]) == (
            sum(r.proposed for r in records),
            verified,
            accepted,
        )
        assert stats["accept_rate"] == accepted / verified
        assert stats["tokens_per_round"] == np.mean([r.accepted + 1 for r in records])
        assert stats["accepted_by_position"] == [
            sum(1 for r in records if r.accepted >= k) for k in range(1, BLOCK + 1)
        ]
        assert stats["tokens"] == (90 if name is None else 30)
        assert stats["tokens_per_second"] == stats["tokens"] / stats["seconds"]
    assert [per["prompt_tokens"] for per in out.stats["per_prompt"]] == [len(p) for p in prompts]
    counters, skipped = (
        out.stats["gate"],
        [kind for records in out.rounds for kind in kinds(records) if kind],
    )
    assert counters["rounds"] == out.stats["rounds"] and counters["skipped"] == len(skipped)
    assert counters["margin_skipped"] == skipped.count("margin") > 0
    assert counters["truncated"] == sum(
        0 < r.verified < BLOCK for records in out.rounds for r in records
    )
    seconds = [per["seconds"] for per in out.stats["per_prompt"]]
    assert out.stats["seconds"] > max(seconds) >= min(seconds) > 0, "of all together"


def test_plain_has_no_rounds(model, prompts):
    out = dspark.generate(model, prompts[:2], 5, "plain", stop_token_ids=[], streams=1)
    assert out.rounds == [[], []]
    assert out.stats["rounds"] == 0 and out.stats["gate"] is None and out.stats["tokens"] == 10
    assert out.stats["accept_rate"] is None and out.stats["tokens_per_round"] is None


@pytest.mark.parametrize("mode", ("plain", *SPECULATIVE))
def test_a_stream_of_one_token_is_no_round(model, prompts, plain, mode, monkeypatch):
    """By length or by a stop token: the prefill knows that nothing follows."""
    dspark.generate(model, prompts[0], 2, mode)
    monkeypatch.setattr(engines.Engine, "_run_arguments", None)
    for length, stops in ((1, []), (40, [plain[0][0]])):
        out = dspark.generate(model, prompts[0], length, mode, stop_token_ids=stops)
        assert out.tokens == [plain[0][:1]] and out.rounds == [[]] and out.stats["rounds"] == 0
        assert out.finish_reasons == ["stop" if stops else "length"]


def check_company(model, prompts, mode, streams):
    """Before, after and beside each other; some have to wait for a place."""
    order = [0, 2, 1, 0, 1, 2, 0]
    together = dspark.generate(
        model, [prompts[i] for i in order], 30, mode, GATES[1], stop_token_ids=[], streams=streams
    )
    for i, tokens, rounds in zip(order, together.tokens, together.rounds, strict=True):
        assert (tokens, rounds) == continuation(model, prompts[i], 30, mode, gate=GATES[1])


@pytest.mark.parametrize(
    ("mode", "streams"),
    [
        ("plain", 1),
        ("sequential", 1),
        ("block", 1),
        pytest.param("plain", 4, marks=pytest.mark.heavy),
        pytest.param("block", 4, marks=pytest.mark.heavy),
    ],
)
def test_a_prompt_gives_the_same_alone_and_with_others(model, prompts, mode, streams):
    check_company(model, prompts, mode, streams)


@pytest.mark.heavy
@ON_GOLDEN
def test_a_prompt_gives_the_same_beside_others_in_sequence(model, prompts):
    check_company(model, prompts, "sequential", 4)


@pytest.mark.parametrize("mode", ("plain", *SPECULATIVE))
def test_stream_is_generate_round_by_round(model, prompts, mode):
    out = dspark.generate(model, prompts[1], 31, mode, GATES[2], stop_token_ids=[])
    events = list(dspark.stream(model, prompts[1], 31, mode, GATES[2], stop_token_ids=[]))
    assert [token for event in events for token in event.tokens] == out.tokens[0]
    assert events[0].record is None and len(events[0].tokens) == 1
    assert [event.record for event in events[1:] if event.record] == out.rounds[0]
    assert all(event.text is None for event in events)
    if mode == "plain":
        assert [len(event.tokens) for event in events] == [1] * 31
    else:
        assert [len(event.tokens) for event in events[1:-1]] == [
            r.accepted + 1 for r in out.rounds[0][:-1]
        ]


def test_two_streams_at_once_do_not_mix(model, prompts, plain):
    streams = [dspark.stream(model, prompts[i], 20, stop_token_ids=[]) for i in (0, 1)]
    seen = [[], []]
    for _ in range(30):
        for events, tokens in zip(streams, seen):
            tokens += next(events).tokens if len(tokens) < 20 else []
    assert seen == [plain[0][:20], plain[1][:20]]


def test_generate_gives_its_caches_away_and_nothing_else(model, prompts, monkeypatch):
    """The loop works in place; the model's arrays survive."""
    caches, inner = [], engines.Engine._run_arguments

    def arguments(self, *asked):
        caches.append(self._cache)
        return inner(self, *asked)

    monkeypatch.setattr(engines.Engine, "_run_arguments", arguments)
    continuation(model, prompts[0], 20, "block")
    assert caches and all(leaf.is_deleted() for leaf in jax.tree.leaves(caches[-1]))
    assert not model.module.main.embed[...].is_deleted()


def test_200_rounds_of_everything_compile_nothing(model, prompts, plain):
    """Prompt lengths, output lengths, stop tokens, gate numbers and drafters are data."""
    rng, rounds, texts = np.random.default_rng(0), 0, prompts[2] + plain[2]
    for mode in ("plain", *SPECULATIVE):
        continuation(model, prompts[0], 2, mode)
    drafters = [model, hostile(model, prompts[0], plain[0]), scripted(model, [OWN] * 9 + plain[1])]
    with compilations() as compiled:
        while rounds < 200:
            length = int(rng.integers(1, 40))
            gate = dspark.GateConfig(
                enabled=bool(rng.integers(2)),
                margin_threshold=float(rng.integers(2)) * 0.2,
                plain_ms=float(rng.integers(50, 400)),
                min_draft=int(rng.integers(4)),
            )
            out = dspark.generate(
                drafters[rng.integers(3)],
                texts[:length],
                int(rng.integers(1, 60)),
                SPECULATIVE[rng.integers(2)],
                gate,
                stop_token_ids=rng.integers(0, 256, rng.integers(4)).tolist(),
            )
            rounds += len(out.rounds[0])
            assert out.stats["compile_seconds"] == 0
        dspark.generate(model, texts[:3], 40, "plain")
        list(dspark.stream(model, texts[:5], 20))
    assert not compiled


def test_compile_seconds_are_counted_apart(plain_run):
    """Beside the two programs, only arrays are made (by a `<lambda>`, where it is a cache's)."""
    out, compiled = plain_run
    made = {"jit(broadcast_in_dim)", "jit(convert_element_type)", "jit(<lambda>)"}
    assert [name for name in compiled if name not in made] == ["jit(program)"] * 2, (
        "a prefill chunk and a call of rounds"
    )
    assert out.stats["compile_seconds"] > 0


# Text


def test_streamed_text_adds_up(model, prompts):
    """Ids of single bytes, random ones: whole characters, split ones and broken ones occur."""
    model = dataclasses.replace(model, tokenizer=byte_tokenizer())
    out = dspark.generate(model, prompts, 60, stop_token_ids=[], streams=1)
    assert out.texts == [bytes(tokens).decode(errors="replace") for tokens in out.tokens]
    for prompt, text in zip(prompts, out.texts):
        events = list(dspark.stream(model, prompt, 60, stop_token_ids=[]))
        assert "".join(event.text for event in events) == text


def test_text_prompts_are_what_they_encode_to(model, plain):
    model = dataclasses.replace(model, tokenizer=byte_tokenizer())
    text = "caf\u00e9 \U0001f642"
    options = {"stop_token_ids": [], "streams": 1}
    out = dspark.generate(model, [text, "b"], 9, **options)
    assert out.tokens == dspark.generate(model, [list(text.encode()), [98]], 9, **options).tokens
    assert dspark.generate(model, text, 9, stop_token_ids=[]).tokens == out.tokens[:1]
