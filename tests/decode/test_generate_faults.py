"""What goes wrong while generate() and stream() run: logits and drafts that are not finite, Ctrl-C.
Nothing that was emitted is lost.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dspark_jax as dspark
from dspark_jax.decode import engine as engines
from dspark_jax.decode import run as runs

from helpers.round_parts import BLOCK, continuation, perfect, scripted, with_nan_drafter
from helpers.support import MAX_SEQ_LEN

SPECULATIVE = ("sequential", "block")


@pytest.fixture(scope="module")
def model(scripted_model):
    return scripted_model


@pytest.mark.parametrize("mode", ("plain", *SPECULATIVE))
def test_nan_in_the_prompt_is_an_error_that_names_the_position(model, prompts, mode):
    damaged = scripted(model, nan_tokens=[prompts[1][20]])
    with pytest.raises(dspark.NumericsError, match="logits at position 22 are not finite") as error:
        dspark.generate(damaged, prompts[1], 4, mode)
    assert error.value.output.tokens == [[]]
    assert error.value.output.finish_reasons == ["error"]


@pytest.mark.parametrize("mode", ("plain", *SPECULATIVE))
@pytest.mark.parametrize("index", [0, 3, 6, 11])
def test_nan_in_a_round_is_an_error_after_the_last_sound_token(model, prompts, plain, mode, index):
    token, seen = plain[0][index], []
    assert token not in prompts[0] + plain[0][:index]
    for script in ([], [*prompts[0], *plain[0]]):
        damaged = scripted(model, script, nan_tokens=[token])
        with pytest.raises(
            dspark.NumericsError,
            match=f"logits at position {len(prompts[0]) + index} are not finite",
        ):
            dspark.generate(damaged, prompts[0], 40, mode, stop_token_ids=[])
        events, tokens = dspark.stream(damaged, prompts[0], 40, mode, stop_token_ids=[]), []
        with pytest.raises(dspark.NumericsError):
            for event in events:
                tokens += event.tokens
        seen.append(tokens)
    assert seen == [plain[0][: index + 1]] * 2


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_nan_after_a_rejected_draft_does_no_harm(model, prompts, plain, mode):
    """What plain decoding never computes cannot fail a run: a wrong draft, and what follows the end
    of the output.
    """
    strange = next(
        t
        for t in range(256)
        if t not in prompts[0] + plain[0] and t != model.config.dspark_noise_token_id
    )
    assert (
        continuation(
            scripted(model, [strange] * MAX_SEQ_LEN, nan_tokens=[strange]), prompts[0], 40, mode
        )[0]
        == plain[0][:40]
    )
    oracle = perfect(model, prompts[0], plain[0], nan_tokens=[plain[0][9]])
    assert continuation(oracle, prompts[0], 10, mode)[0] == plain[0][:10]
    assert (
        continuation(oracle, prompts[0], 40, mode, stop_token_ids=[plain[0][9]])[0] == plain[0][:10]
    )
    with pytest.raises(dspark.NumericsError):
        continuation(oracle, prompts[0], 11, mode)


@pytest.mark.parametrize("streams", [1, pytest.param(4, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("number", [0, 1])
def test_a_fault_of_one_stream_lets_the_others_end(model, prompts, plain, number, streams):
    """Beside it and after it; the error is raised then, and has what all of them emitted."""
    plain = [stream[:24] for stream in plain]
    own, others = plain[number], [stream for i, stream in enumerate(plain) if i != number]
    elsewhere = set(itertools.chain(*prompts, *others))
    index, token = next(
        (index, token)
        for index, token in enumerate(own)
        if index > 1 and token not in {*elsewhere, *own[:index]}
    )
    damaged = scripted(model, nan_tokens=[token])
    position = len(prompts[number]) + index
    with pytest.raises(
        dspark.NumericsError,
        match=f"^prompt {number}: the logits at position {position} are not finite",
    ) as error:
        dspark.generate(damaged, prompts, 24, stop_token_ids=[], streams=streams)
    out = error.value.output
    assert out.tokens == [
        own[: index + 1] if i == number else stream for i, stream in enumerate(plain)
    ]
    assert out.finish_reasons == ["error" if i == number else "length" for i in range(3)]
    assert out.stats["gate"]["rounds"] == sum(map(len, out.rounds))


@pytest.mark.parametrize("streams", [1, pytest.param(4, marks=pytest.mark.heavy)])
def test_a_fault_in_a_prompt_leaves_nothing_to_the_next(model, prompts, plain, streams):
    """It was prefilled in the same cache."""
    token = next(t for t in prompts[1] if t not in {*prompts[0], *prompts[2], *plain[0], *plain[2]})
    damaged = scripted(model, nan_tokens=[token])
    order = [0, 1, 2, 1, 0]
    with pytest.raises(dspark.NumericsError, match="^prompt 1: .* .so ended prompts 3 too.$") as e:
        dspark.generate(
            damaged, [prompts[i] for i in order], 75, stop_token_ids=[], streams=streams
        )
    assert e.value.output.tokens == [[] if i == 1 else plain[i] for i in order]


def float_parameters(drafter):
    """Their paths."""
    return [
        ".".join(map(str, path))
        for path, variable in nnx.to_flat_state(nnx.state(drafter))
        if jnp.issubdtype(variable[...].dtype, jnp.floating)
    ]


def test_every_nan_tensor_of_the_drafter_is_an_error(model, prompts, plain):
    """The tokens would stay right, and every draft be rejected without a word. Plain decoding needs
    no drafter.
    """
    paths = float_parameters(model.module.drafter.own)
    assert len(paths) > 15
    silent = []
    for path in paths:
        damaged, tokens = with_nan_drafter(model, path), []
        try:
            for event in dspark.stream(damaged, prompts[0], 4, stop_token_ids=[]):
                tokens += event.tokens
            silent.append(path)
        except dspark.NumericsError as error:
            assert f"the drafts of the round at position {len(prompts[0])} are not finite" in str(
                error
            ) and "mtp.*" in str(error)
            assert tokens == plain[0][:1]
    assert not silent
    assert continuation(damaged, prompts[0], 4, "plain")[0] == plain[0][:4]


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("score", [np.inf, -np.inf])
def test_a_drafter_that_fails_later_keeps_the_tokens_before(model, prompts, plain, mode, score):
    """The third round of accepted blocks; the position is that of its anchor."""
    anchor = len(prompts[0]) + 2 * (BLOCK + 1)
    confidence = np.zeros(anchor + 2)
    confidence[anchor + 1] = score
    damaged, tokens = scripted(model, [*prompts[0], *plain[0]], confidence), []
    with pytest.raises(
        dspark.NumericsError,
        match=f"prompt 0: the drafts of the round at position {anchor} are not finite",
    ):
        for event in dspark.stream(damaged, prompts[0], 40, mode, stop_token_ids=[]):
            tokens += event.tokens
    assert tokens == plain[0][: 1 + 2 * (BLOCK + 1)]
    skipping = dspark.GateConfig(enabled=True, margin_threshold=1e6)
    assert continuation(damaged, prompts[0], 40, mode, gate=skipping)[0] == plain[0][:40], (
        "nothing is drafted, nothing is damaged"
    )


def interrupt(monkeypatch, when):
    """Ctrl-C before the host hears of a call of four rounds of which when(engine) is true; the
    device is at the next call by then.
    """
    heard = engines.Engine._heard

    def hear(self, call):
        if when(self):
            raise KeyboardInterrupt
        yield from heard(self, call)

    monkeypatch.setattr(runs, "ROUNDS_PER_CALL", 4)
    monkeypatch.setattr(engines.Engine, "_heard", hear)


@pytest.mark.parametrize("calls", [0, 1])
def test_ctrl_c_keeps_what_was_emitted(model, prompts, plain, monkeypatch, calls):
    """Within the second prompt, before its first or its second call of rounds is heard of."""
    left = iter(range(calls, -1, -1))
    interrupt(monkeypatch, lambda engine: engine._slots.owners[0] == 1 and next(left) == 0)
    with pytest.raises(dspark.Interrupted) as interrupted:
        dspark.generate(model, prompts, 75, stop_token_ids=[], streams=1)
    out = interrupted.value.output
    assert isinstance(interrupted.value, KeyboardInterrupt)
    assert out.finish_reasons == ["length", "interrupted", "interrupted"]
    assert out.tokens[0] == plain[0] and out.tokens[2] == [] == out.rounds[2]
    assert len(out.rounds[1]) == 4 * calls
    assert out.tokens[1] == plain[1][: 1 + sum(r.accepted + 1 for r in out.rounds[1])]
    assert out.stats["gate"]["rounds"] == len(out.rounds[0]) + 4 * calls
    assert out.stats["tokens"] == sum(map(len, out.tokens))


@pytest.mark.heavy
def test_ctrl_c_keeps_what_every_stream_emitted(model, prompts, plain, monkeypatch):
    """Three streams side by side, after their first call of rounds."""
    interrupt(monkeypatch, lambda engine: engine.slot_rounds)
    with pytest.raises(dspark.Interrupted) as interrupted:
        dspark.generate(model, prompts, 75, stop_token_ids=[])
    out = interrupted.value.output
    assert out.finish_reasons == ["interrupted"] * 3 and [len(r) for r in out.rounds] == [4] * 3
    for tokens, rounds, whole in zip(out.tokens, out.rounds, plain):
        assert tokens == whole[: 1 + sum(r.accepted + 1 for r in rounds)]
    assert out.stats["gate"]["rounds"] == 12 and out.stats["tokens"] == sum(map(len, out.tokens))


def test_ctrl_c_while_compiling_gives_nothing(model, prompts, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(engines.Engine, "_warm_up", interrupted)
    with pytest.raises(dspark.Interrupted) as interrupted_run:
        dspark.generate(model, prompts[:2], 5)
    out = interrupted_run.value.output
    assert out.tokens == [[], []] and out.finish_reasons == ["interrupted"] * 2
    assert out.stats["tokens"] == 0


def test_a_callers_loop_ends_with_ctrl_c(model, prompts, monkeypatch):
    """The caller need not look at finish reasons: what interrupts a call interrupts its loop."""
    calls = []

    def interrupted(self):
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(engines.Engine, "_warm_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for prompt in prompts:
            dspark.generate(model, prompt, 5)
    assert len(calls) == 1


def test_progress_goes_to_standard_error(model, prompts, capsys):
    dspark.generate(model, prompts, 9, stop_token_ids=[], streams=1, progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "27/27" in shown.err
    dspark.generate(model, prompts[0], 9)
    assert capsys.readouterr().err == ""
