"""What becomes of the options of a request, and of a session that stands before its prompts. Runs
nothing.
"""

import enum
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, processors

import dspark_jax as dspark
from dspark_jax.decode.request import Prompt, Request, encode, make_request

from helpers.request_parts import MODEL, ROOM, made, of, refused, stub
from helpers.round_parts import byte_tokenizer
from helpers.small_model import CONFIG

INF = float("inf")


def test_what_is_not_said():
    request = make_request(stub(room=129), [1])
    assert request == Request(
        (Prompt((1,), 128, frozenset(CONFIG.eos_token_id), (), 0.0, 0, 1.0, 0.0, 0, 0, ()),),
        "block",
        dspark.GateConfig(),
        1,
        None,
        False,
        None,
    )


ONE = {"int": 3, "numpy": np.int64(3), "small": np.uint8(3), "array": np.array(3)}
ONE |= {"jax": jnp.int32(3), "own": enum.IntEnum("Own", {"three": 3}).three}


@pytest.mark.parametrize("three", ONE.values(), ids=ONE)
def test_a_number_serves_all_prompts(three):
    for option in ("max_new_tokens", "top_k", "seed", "temperature"):
        values = of(option, **{option: three})
        assert values == [3] * 3
        assert {type(value) for value in values} == {float if option == "temperature" else int}
    assert made(streams=three, logprobs=three).streams == 4
    assert made(logprobs=three).logprobs == 3
    assert of("bias", logit_bias={5: three}) == [((5, 3.0),)] * 3
    assert of("bias", forbidden_tokens=[three]) == [((3, -INF),)] * 3
    assert of("stop_token_ids", stop_token_ids=[three]) == [{3}] * 3


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.array, jnp.array, lambda values: [jnp.asarray(value) for value in values]],
)
def test_a_list_is_one_for_each(kind):
    assert of("max_new_tokens", max_new_tokens=kind([3, 1, 2])) == [3, 1, 2]
    assert of("top_k", top_k=kind([3, 1, 2])) == [3, 1, 2]
    assert of("temperature", temperature=kind([0.5, 0.0, 2.0])) == [0.5, 0.0, 2.0]
    assert of("top_p", top_p=kind([0.5, 1.0, 0.25])) == [0.5, 1.0, 0.25]
    assert of("min_p", min_p=kind([0.5, 0.0, 0.25])) == [0.5, 0.0, 0.25]
    assert of("seed", seed=kind([7, 7, 9])) == [7, 7, 9]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_floats_of_all_widths(dtype):
    assert of("temperature", temperature=jnp.array(0.5, dtype)) == [0.5] * 3
    assert of("temperature", temperature=jnp.array([0.5, 0, 1], dtype)) == [0.5, 0, 1]
    assert of("temperature", temperature=np.longdouble(0.5)) == [0.5] * 3


def test_noise_of_a_seed_for_all_and_of_seeds_for_each():
    for seed in (5, np.array(5), 2**32 - 1):
        assert of("index", seed=seed) == [0, 1, 2]
    for seeds in ([5, 5, 5], np.array([1, 2, 3])):
        assert of("index", seed=seeds) == [0, 0, 0]


def test_numbers_that_mean_as_much_as_others():
    """So many best tokens are all of them; a temperature that float32 has no number for is none."""
    assert of("top_k", top_k=[255, 256, 2**40]) == [255, 0, 0]
    assert of("temperature", temperature=[1e-50, 1e-39, 2e-38]) == [0, 0, 2e-38]


def test_a_request_is_sampled_if_a_prompt_is():
    assert not made().sampled and not made(top_k=3, temperature=[0, 0, 1e-50]).sampled
    assert made(temperature=[0, 0, 0.1]).sampled


def test_stop_strings():
    for stop in ("ab", ["ab"], ("ab", "ab"), np.array("ab"), {"ab"}, ["ab", ["ab"], ("ab",)]):
        assert of("stop", stop=stop) == [("ab",)] * 3
    assert of("stop", stop=["b", "a", "b"]) == [("b", "a")] * 3
    assert of("stop", stop={"b", "a"}) == [("a", "b")] * 3, "the same in every process"
    assert of("stop", stop=[["b"], [], None]) == [("b",), (), ()]
    assert of("stop", stop=[]) == of("stop") == [()] * 3


def test_stop_ids():
    usual = frozenset(CONFIG.eos_token_id)
    for ids in ([3, 4], (3, 4), {3, 4}, range(3, 5), np.array([3, 4]), jnp.array([[3, 4]] * 3)):
        assert of("stop_token_ids", stop_token_ids=ids) == [{3, 4}] * 3
    assert of("stop_token_ids") == [usual] * 3 and usual
    assert of("stop_token_ids", stop_token_ids=[]) == [set()] * 3
    assert of("stop_token_ids", stop_token_ids=[None, [], [jnp.int32(3)]]) == [usual, set(), {3}]


def test_bias_and_forbidden_tokens_are_one():
    bias = {9: 2, np.int64(3): jnp.float32(-1.5), 5: np.array(4)}
    assert of("bias", logit_bias=bias) == [((3, -1.5), (5, 4.0), (9, 2.0))] * 3
    assert (
        of("bias", logit_bias=bias, forbidden_tokens=[5, 1])
        == [((1, -INF), (3, -1.5), (5, -INF), (9, 2.0))] * 3
    )
    biases, forbidden = [{9: 1}, None, {}], [None, [4], np.array([2])]
    each = [((9, 1.0),), ((4, -INF),), ((2, -INF),)]
    assert of("bias", logit_bias=biases, forbidden_tokens=forbidden) == each
    assert of("bias") == of("bias", logit_bias={}, forbidden_tokens=[]) == [()] * 3
    (one, *_) = of("bias", forbidden_tokens=range(255))
    assert one == tuple((token, -INF) for token in range(255))


def test_bits_of_the_whole_request():
    request = made(mode=np.str_("plain"), prompt_logprobs=np.bool_(True), logprobs=0)
    assert (request.mode, request.prompt_logprobs, request.logprobs) == ("plain", True, 0)
    assert type(request.mode) is str
    assert made(prompt_logprobs=jnp.array(True)).prompt_logprobs is True
    assert made(logprobs=128).logprobs == 128 and made().logprobs is None
    few = stub(vocab_size=16, dspark_noise_token_id=15)
    assert made(model=few, logprobs=16).logprobs == 16
    assert refused(model=few, logprobs=17).startswith("logprobs: 17 is not an integer from 0 to 16")


@pytest.mark.parametrize(
    "prompts, rows, streams, slots",
    [
        (1, 1, None, 1),
        (2, 1, None, 2),
        (3, 1, None, 4),
        (5, 1, None, 8),
        (40, 1, None, 8),
        (1, 2, None, 1),
        (2, 2, None, 1),
        (3, 2, None, 2),
        (9, 2, None, 8),
        (40, 4, None, 8),
        (3, 1, 1, 1),
        (3, 1, 3, 4),
        (3, 1, 16, 16),
        (3, 2, 5, 8),
        (40, 1, 33, 64),
    ],
)
def test_streams_are_a_power_of_two(prompts, rows, streams, slots):
    """Counted for each row of the mesh; what is asked for is kept, whether or not it is filled."""
    assert made([[1]] * prompts, stub(rows), streams=streams).streams == slots


# A session before the prompts


def session(tokens, model=MODEL):
    return types.SimpleNamespace(model=model, tokens=list(tokens))


def test_a_prefix_is_a_session_of_this_model():
    for prefix in ([1, 2], "text", 3, types.SimpleNamespace(tokens=[1]), np.zeros(3), MODEL):
        assert refused(prefix=prefix).startswith("prefix: expected a dspark.Session, got ")
    text = types.SimpleNamespace(model=MODEL, tokens="text")
    assert refused(prefix=text).startswith("prefix: expected a dspark.Session")
    assert refused(prefix=session([1], stub())).startswith("prefix: this session is of another")
    given = session([1])
    assert made(prefix=given).prefix is given and made().prefix is None
    assert made(prefix=session([])).prefix is None, "nothing stands before the prompts"
    assert [prompt.ids for prompt in made(prefix=given).prompts] == [(1,), (2, 3), (4,)]


def test_a_prefix_takes_room():
    made(prefix=session([1] * (ROOM - 2 - 4)))
    assert refused(prefix=session([1] * (ROOM - 1 - 4))) == (
        "prompt 1: a prefix of 123 tokens, 2 tokens and max_new_tokens 4 together exceed "
        "max_seq_len 128; ask for fewer tokens or load with a larger max_seq_len"
    )
    model = stub(max_position_embeddings=20)
    made(model=model, prefix=session([1] * 14, model))
    with pytest.warns(UserWarning, match="come to 21 tokens"):
        made(model=model, prefix=session([1] * 15, model))


@pytest.mark.parametrize("nothing", [[], "", [[]], np.array([], int), [""]])
def test_after_a_prefix_a_prompt_may_be_empty(nothing):
    assert [prompt.ids for prompt in made(nothing, prefix=session([1])).prompts] == [()]
    for prefix in (None, session([])):
        assert "the prompt is empty" in refused(nothing, prefix=prefix)


def test_text_after_a_prefix_has_no_beginning():
    """What a tokenizer puts before every text stands at the beginning of a stream only."""
    first, tokenizer = CONFIG.bos_token_id, byte_tokenizer()
    token = tokenizer.id_to_token(first)
    tokenizer.add_special_tokens([AddedToken(token, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, first)]
    )
    model = stub(tokenizer=tokenizer)
    for prefix in (None, session([], model), session([9], model)):
        request = made(["a", [97]], model, prefix=prefix)
        text = (first, 97) if prefix is None or not prefix.tokens else (97,)
        assert [prompt.ids for prompt in request.prompts] == [text, (97,)]
    assert encode(model, "a") == [[first, 97]] and encode(model, "a", begins=False) == [[97]]
    assert made(token + "a", model, prefix=session([9], model)).prompts[0].ids == (first, 97)


def test_ids_of_other_integers():
    three = enum.IntEnum("Own", {"three": 3}).three
    for ids in ([three, 4], [[three, np.int8(4)]], [[jnp.int32(3), 4]]):
        (prompt,) = made(ids).prompts
        assert prompt.ids == (3, 4) and {type(token) for token in prompt.ids} == {int}
    said = refused([[2**20000]])
    assert said.startswith("prompt 0: token id an integer of 20001 bits at index 0 is outside")
