"""Options that no request is served with: one clear error each, and nothing is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decode.options import Options
from dspark_jax.decode.request import check_options

from helpers.request_parts import ROOM, made, of, refused, stub


class Unequal:
    """As tables of other libraries are: not to be asked whether it equals something."""

    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None

    def __repr__(self):
        return "Unequal"


INF, NAN = float("inf"), float("nan")

# What is refused: option, value, message. With {}: also as the value of the third prompt, where the
# message names it.

SCALARS = [
    ("max_new_tokens", 0, "max_new_tokens{}: 0 is not a positive integer"),
    ("max_new_tokens", 2.0, "max_new_tokens{}: 2.0 is not a positive integer"),
    ("max_new_tokens", True, "max_new_tokens{}: True is not a positive integer"),
    ("max_new_tokens", None, "max_new_tokens{}: None is not a positive integer"),
    ("max_new_tokens", jnp.array(True), "max_new_tokens{}: True is not a positive integer"),
    ("temperature", -0.1, "temperature{}: -0.1 is not a finite number of 0 or more (0: greedy)"),
    ("temperature", NAN, "temperature{}: nan is not a finite number"),
    ("temperature", INF, "temperature{}: inf is not a finite number"),
    ("temperature", np.float16(NAN), "temperature{}: nan is not a finite number"),
    ("temperature", 1e39, "temperature{}: 1e+39 is not a finite number"),
    ("temperature", 10**400, "temperature{}: 1000"),
    ("temperature", 10**5000, "temperature{}: an integer of 16610 bits is not a finite number"),
    ("temperature", "0.5", "temperature{}: '0.5' is not a finite number"),
    ("temperature", None, "temperature{}: None is not a finite number"),
    ("temperature", False, "temperature{}: False is not a finite number"),
    ("temperature", 1j, "temperature{}: 1j is not a finite number"),
    ("temperature", np.datetime64("2026-01-01"), "temperature{}: "),
    ("temperature", jax.random.key(0), "temperature{}: "),
    ("temperature", {0: 1.0}, "temperature{}: {{0: 1.0}} is not a finite number"),
    ("top_k", -1, "top_k{}: -1 is not an integer of 0 or more (0: all tokens)"),
    ("top_k", 1.5, "top_k{}: 1.5 is not an integer"),
    ("top_k", True, "top_k{}: True is not an integer"),
    ("top_p", 0, "top_p{}: 0 is not a number above 0 and at most 1 (1: all tokens)"),
    ("top_p", 1.01, "top_p{}: 1.01 is not a number above 0"),
    ("top_p", NAN, "top_p{}: nan is not a number above 0"),
    ("top_p", True, "top_p{}: True is not a number above 0"),
    ("min_p", 1, "min_p{}: 1 is not a number of at least 0 and below 1 (0: all tokens)"),
    ("min_p", -1e-9, "min_p{}: -1e-09 is not a number of at least 0"),
    ("min_p", NAN, "min_p{}: nan is not a number of at least 0"),
    ("seed", None, "seed{}: None is not an integer from 0 to 4294967295; a seed is never drawn"),
    ("seed", -1, "seed{}: -1 is not an integer from 0 to 4294967295"),
    ("seed", 2**32, "seed{}: 4294967296 is not an integer from 0"),
    ("seed", 1.0, "seed{}: 1.0 is not an integer from 0"),
    ("seed", True, "seed{}: True is not an integer from 0"),
    ("logit_bias", {256: 1.0}, "logit_bias{}: 256 is not a token id (0 to 255)"),
    ("logit_bias", {"5": 1.0}, "logit_bias{}: '5' is not a token id (0 to 255)"),
    ("logit_bias", {True: 1.0}, "logit_bias{}: True is not a token id"),
    ("logit_bias", {5: NAN}, "logit_bias{}: token 5: nan is not a finite number"),
    ("logit_bias", {5: -INF}, "logit_bias{}: token 5: -inf is not a finite number of float32; "),
    ("logit_bias", {5: 1e39}, "logit_bias{}: token 5: 1e+39 is not a finite number"),
    ("logit_bias", {5: False}, "logit_bias{}: token 5: False is not a finite number"),
    ("logit_bias", {5: [1.0]}, "logit_bias{}: token 5: [1.0] is not a finite number"),
    ("logit_bias", 5, "logit_bias{}: expected a dict from token ids to what is added"),
    ("stop", "", "stop{}: an empty string stands everywhere"),
    ("stop", ["a", ""], "stop{}: an empty string stands everywhere"),
    ("stop", ["a", 3], "stop{}: 3 is not a string"),
    ("stop", 3, "stop{}: expected a string or a list of strings, got 3"),
    ("stop", {"a": 1}, "stop{}: expected a string or a list of strings, got {{'a': 1}}"),
    ("stop", ["x\udcff"], "stop{}: character 1, '\\udcff', is no valid Unicode"),
    ("stop_token_ids", [3, 256], "stop_token_ids{}: 256 is not a token id (0 to 255)"),
    ("stop_token_ids", [-1], "stop_token_ids{}: -1 is not a token id"),
    ("stop_token_ids", [True], "stop_token_ids{}: True is not a token id"),
    ("stop_token_ids", [1.0], "stop_token_ids{}: 1.0 is not a token id"),
    ("stop_token_ids", "5", "stop_token_ids{}: expected a list of token ids, got '5'"),
    ("stop_token_ids", {5: 1}, "stop_token_ids{}: expected a list of token ids, got {{5: 1}}"),
    ("forbidden_tokens", [256], "forbidden_tokens{}: 256 is not a token id (0 to 255)"),
    ("forbidden_tokens", range(-1, 3), "forbidden_tokens{}: -1 is not a token id"),
    (
        "forbidden_tokens",
        range(256),
        "forbidden_tokens{}: all 256 tokens of the vocabulary are forbidden; leave at least one",
    ),
]
OTHERS = [
    ("temperature", [[0.5]] * 3, "temperature of prompt 0: [0.5] is not a finite number"),
    ("top_p", np.ma.array([1, 1, 1], mask=[0, 1, 0]), "top_p of prompt 1: None is not a number"),
    ("top_k", np.ones((3, 1), int), "top_k of prompt 0: [1] is not an integer"),
    ("seed", {1, 2, 3}, "seed: {1, 2, 3} is not an integer"),
    ("stop_token_ids", [3, [4], [5]], "stop_token_ids of prompt 0: expected a list of token ids"),
    ("stop_token_ids", 3, "stop_token_ids: expected a list of token ids, got 3"),
    ("forbidden_tokens", 3, "forbidden_tokens: expected a list of token ids, got 3"),
    ("logit_bias", "ab", "logit_bias: expected a dict from token ids to what is added"),
    ("mode", "blocks", "mode: 'blocks' is unknown; use one of plain, sequential, block"),
    ("mode", None, "mode: None is unknown"),
    ("mode", ["block"], "mode: ['block'] is unknown"),
    ("mode", np.array(["block"]), "mode: ['block'] is unknown"),
    ("mode", np.zeros((2, 2)), "mode: [[0.0, 0.0], [0.0, 0.0]] is unknown"),
    ("mode", Unequal(), "mode: Unequal is unknown"),
    ("gate", None, "gate: expected a dspark.GateConfig, got NoneType"),
    ("gate", "auto", "gate: expected a dspark.GateConfig, got str"),
    ("gate", dspark.GateConfig(min_draft=6), "gate min_draft: 6 exceeds the draft block of 5"),
    ("gate", dspark.GateConfig(decay=None), "gate decay: None is not a number"),
    ("streams", 0, "streams: 0 is not a positive integer; None: as many as there are prompts"),
    ("streams", 2.0, "streams: 2.0 is not a positive integer"),
    ("streams", True, "streams: True is not a positive integer"),
    ("streams", [1, 1, 1], "streams: [1, 1, 1] is not a positive integer"),
    ("logprobs", -1, "logprobs: -1 is not an integer from 0 to 128: of how many"),
    ("logprobs", 129, "logprobs: 129 is not an integer from 0 to 128"),
    ("logprobs", True, "logprobs: True is not an integer from 0 to 128"),
    ("logprobs", 2.0, "logprobs: 2.0 is not an integer from 0 to 128"),
    ("prompt_logprobs", 1, "prompt_logprobs: 1 is neither True nor False"),
    ("prompt_logprobs", None, "prompt_logprobs: None is neither True nor False"),
]
LENGTHS = [  # 3 prompts
    ("max_new_tokens", [1, 2], "max_new_tokens: 2 values for 3 prompts; give one for all prompts"),
    ("temperature", [0.5], "temperature: 1 value for 3 prompts"),
    ("temperature", [], "temperature: 0 values for 3 prompts"),
    ("temperature", jnp.zeros(4), "temperature: 4 values for 3 prompts"),
    ("top_k", (1, 2, 3, 4), "top_k: 4 values for 3 prompts"),
    ("top_p", np.ones(2), "top_p: 2 values for 3 prompts"),
    ("min_p", [0, 0], "min_p: 2 values for 3 prompts"),
    ("seed", [1, 2], "seed: 2 values for 3 prompts"),
    ("stop", [["a"], []], "stop: 2 values for 3 prompts"),
    ("stop_token_ids", [[1], None], "stop_token_ids: 2 values for 3 prompts"),
    ("stop_token_ids", np.ones((2, 2), int), "stop_token_ids: 2 values for 3 prompts"),
    ("logit_bias", [{}, {}], "logit_bias: 2 values for 3 prompts"),
    ("forbidden_tokens", [[], [1]], "forbidden_tokens: 2 values for 3 prompts"),
]


def cases(table):
    names = [f"{option} {number}" for number, (option, *_) in enumerate(table)]
    return pytest.mark.parametrize("option, value, message", table, ids=names)


@cases(SCALARS)
def test_a_value_that_cannot_be_served(option, value, message):
    assert refused(**{option: value}).startswith(message.format(""))
    usable = [1] if option in ("stop_token_ids", "forbidden_tokens") else getattr(Options(), option)
    values = [usable, usable, value]
    assert refused(**{option: values}).startswith(message.format(" of prompt 2"))


@cases(OTHERS + LENGTHS)
def test_a_request_that_cannot_be_served(option, value, message):
    assert refused(**{option: value}).startswith(message)


@cases(LENGTHS)
def test_lists_of_the_wrong_length_are_refused_without_a_model(option, value, message):
    with pytest.raises(dspark.ConfigError) as error:
        check_options(**{option: value}, count=3)
    assert str(error.value).startswith(message)
    check_options(**{option: value})  # nobody knows how many prompts there are


@cases(SCALARS)
def test_much_is_refused_without_a_model(option, value, message):
    """All but what a vocabulary is needed for."""
    if "256" in message:
        return check_options(**{option: value})
    with pytest.raises((dspark.ConfigError, dspark.PromptError)) as error:
        check_options(**{option: value})
    assert str(error.value).startswith(message.format("").replace("0 to 255", "0 or more"))


def test_a_block_that_is_known_is_looked_at():
    gate = dspark.GateConfig(min_draft=6)
    check_options(gate=gate)
    with pytest.raises(dspark.ConfigError, match="6 exceeds the draft block of 5"):
        check_options(gate=gate, block_size=5)


def test_a_traced_number_is_refused():
    with pytest.raises(dspark.ConfigError, match="temperature: .* is not a finite number"):
        jax.eval_shape(lambda t: made(temperature=t), jnp.float32(0.5))
    with pytest.raises(dspark.PromptError, match="prompts: expected a string"):
        jax.eval_shape(lambda ids: made(ids), jnp.array([1, 2]))


def test_stop_strings_need_a_tokenizer():
    for stop in ("a", ["a"], [[], [], ["a"]]):
        said = refused(model=stub(), stop=stop)
        assert said.startswith("stop: this checkpoint has no tokenizer.json") and "ids" in said
    for stop in (None, [], [[], None, ()]):
        assert made(model=stub(), stop=stop).prompts[0].stop == ()


def test_the_room_is_that_of_each_prompt():
    most = [ROOM - 1, ROOM - 2, ROOM - 1]
    assert of("max_new_tokens", max_new_tokens=most) == most
    assert refused(max_new_tokens=[1, ROOM - 1, 1]) == (
        "prompt 1: 2 tokens and max_new_tokens 127 together exceed max_seq_len 128; ask for fewer "
        "tokens or load with a larger max_seq_len"
    )
    assert "prompt 0: 1 token and max_new_tokens an int" in refused(max_new_tokens=10**5000)
