"""What goes wrong while generate() and stream() run: logits and drafts that are not finite, Ctrl-C.
Nothing that was emitted is lost.
"""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dspark_jax as dspark
from dspark_jax.decode import engine as engines

from helpers.round_parts import BLOCK, continuation, perfect, scripted, with_nan_drafter
from helpers.support import MAX_SEQ_LEN

generate_module = importlib.import_module(
    "dspark_jax.decode.generate"
)  # the package's attribute of that name is the function
SPECULATIVE = ("sequential", "block")


@pytest.fixture(scope="module")
def model(scripted_model):
    return scripted_model


@pytest.mark.parametrize("mode", ("plain", *SPECULATIVE))
def test_nan_in_the_prompt_is_an_error_that_names_the_position(model, prompts, mode):
    damaged = scripted(model, nan_tokens=[prompts[1][20]])
    with pytest.raises(dspark.NumericsError, match="logits at position 22 are not finite"):
        dspark.generate(damaged, prompts[1], 4, mode)


@pytest.mark.parametrize("mode", ("plain", *SPECULATIVE))
@pytest.mark.parametrize("index", [0, 3, 6, 11])
def test_nan_in_a_round_is_an_error_behind_the_last_sound_token(model, prompts, plain, mode, index):
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
def test_nan_behind_a_rejected_draft_does_no_harm(model, prompts, plain, mode):
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


@pytest.mark.parametrize("calls", [0, 1])
def test_ctrl_c_keeps_what_was_emitted(model, prompts, plain, monkeypatch, calls):
    """Within the second prompt, in its first or its second call of rounds, while the device has the
    state.
    """
    monkeypatch.setattr(generate_module, "ROUNDS_PER_CALL", 4)
    left, run = [None], engines.Engine._run

    def run_or_stop(self, state, most):
        if int(state.cache.position[0]) == len(prompts[1]) and int(state.remaining[0]) == 74:
            left[0] = calls
        out = run(self, state, most)
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] = None if left[0] is None else left[0] - 1
        return out

    monkeypatch.setattr(engines.Engine, "_run", run_or_stop)
    with pytest.raises(dspark.Interrupted) as interrupted:
        dspark.generate(model, prompts, 75, stop_token_ids=[])
    out = interrupted.value.output
    assert isinstance(interrupted.value, KeyboardInterrupt)
    assert out.finish_reasons == ["length", "interrupted", "interrupted"]
    assert out.tokens[0] == plain[0] and out.tokens[2] == [] == out.rounds[2]
    assert len(out.rounds[1]) == 4 * calls
    assert out.tokens[1] == plain[1][: 1 + sum(r.accepted + 1 for r in out.rounds[1])]
    assert out.stats["gate"]["rounds"] == len(out.rounds[0]) + 4 * calls
    assert out.stats["tokens"] == sum(map(len, out.tokens))


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
    dspark.generate(model, prompts[:2], 9, stop_token_ids=[], progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "18/18" in shown.err
    dspark.generate(model, prompts[0], 9)
    assert capsys.readouterr().err == ""
