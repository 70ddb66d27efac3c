"""What generate() and stream() refuse, each with one clear error before anything is compiled; and
text from tokens. Runs no model.
"""

import dataclasses
import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

import dspark_jax as dspark
from dspark_jax.decode.request import encode, make_request
from dspark_jax.decode.text import IncrementalText, decode
from dspark_jax.loading.load import embedded_checkpoint

from helpers.round_parts import byte_tokenizer, compilations

REFUSALS = {
    "no prompt": (([],), {}, dspark.PromptError, "the prompt is empty"),
    "empty prompt": (([[]],), {}, dspark.PromptError, "prompt 0: the prompt is empty"),
    "second empty": (([[1], []],), {}, dspark.PromptError, "prompt 1: the prompt is empty"),
    "id too large": (
        ([1, 256],),
        {},
        dspark.PromptError,
        "prompt 0: token id 256 at index 1 is outside the vocabulary .0 to 255",
    ),
    "id negative": (([[1], [3, -1]],), {}, dspark.PromptError, "prompt 1: token id -1 at index 1"),
    "id fraction": (([[1.5]],), {}, dspark.PromptError, "prompt 0: token ids must be integers"),
    "id fraction among ids": (
        ([1, 2.5],),
        {},
        dspark.PromptError,
        "prompt 0: token ids must be integers; 2.5 at index 1 is a float",
    ),
    "id fraction in an array": (
        ([[1], jnp.array([0.5])],),
        {},
        dspark.PromptError,
        "prompt 1: token ids must be integers; 0.5 at index 0 is a float",
    ),
    "id fraction of numpy": (
        ([1, np.float32(2.5)],),
        {},
        dspark.PromptError,
        "prompt 0: token ids must be integers; 2.5 at index 1 is a float",
    ),
    "id none": (
        ([1, None],),
        {},
        dspark.PromptError,
        "prompt 0: token ids must be integers; None at index 1 is a NoneType",
    ),
    "flat bool": (
        ([True, 2],),
        {},
        dspark.PromptError,
        "prompt 0: token ids must be integers; True at index 0 is a bool",
    ),
    "number in an array": (
        (jnp.int32(7),),
        {},
        dspark.PromptError,
        "prompts: expected a string, strings, token ids or lists of token ids, got int",
    ),
    "id bool": (([[True]],), {}, dspark.PromptError, "prompt 0: token ids must be integers"),
    "id huge": (([[2**80]],), {}, dspark.PromptError, "prompt 0"),
    "no list": ((7,), {}, dspark.PromptError, "prompts: expected a string, strings, token ids"),
    "mixed": (
        ([[1], 7],),
        {},
        dspark.PromptError,
        "prompt 1: expected a string or a list of token ids, got int",
    ),
    "text without tokenizer": (
        ("hello",),
        {},
        dspark.PromptError,
        "prompt 0 is text, but this checkpoint has no tokenizer.json",
    ),
    "too long": (
        ([1] * 100, 29),
        {},
        dspark.PromptError,
        "100 tokens and max_new_tokens 29 together exceed max_seq_len 128",
    ),
    "second too long": (([[1], [1] * 128], 1), {}, dspark.PromptError, "prompt 1: 128 tokens"),
    "nothing wanted": (
        ([1], 0),
        {},
        dspark.ConfigError,
        "max_new_tokens: 0 is not a positive integer",
    ),
    "fraction wanted": (([1], 2.5), {}, dspark.ConfigError, "max_new_tokens: 2.5"),
    "mode": (
        ([1], 4, "blocks"),
        {},
        dspark.ConfigError,
        "mode: 'blocks' is unknown; use one of plain, sequential, block",
    ),
    "temperature": (
        ([1],),
        {"temperature": -0.5},
        dspark.ConfigError,
        "temperature: -0.5 is not a finite number of 0 or more",
    ),
    "temperature of the second": (
        ([[1], [2]],),
        {"temperature": [0.5, float("nan")]},
        dspark.ConfigError,
        "temperature of prompt 1: nan is not a finite number",
    ),
    "too few": (
        ([[1], [2]],),
        {"temperature": [0.5]},
        dspark.ConfigError,
        "temperature: 1 value for 2 prompts",
    ),
    "top_k": (([1],), {"top_k": -3}, dspark.ConfigError, "top_k: -3 is not an integer"),
    "top_p": (([1],), {"top_p": 0.0}, dspark.ConfigError, "top_p: 0.0 is not a number above 0"),
    "min_p": (([1],), {"min_p": 1.0}, dspark.ConfigError, "min_p: 1.0 is not a number"),
    "seed": (([1],), {"seed": None}, dspark.ConfigError, "seed: None is not an integer from 0"),
    "streams": (([1],), {"streams": 0}, dspark.ConfigError, "streams: 0 is not a positive"),
    "logprobs": (([1],), {"logprobs": 129}, dspark.ConfigError, "logprobs: 129 is not an integer"),
    "stop empty": (([1],), {"stop": [""]}, dspark.ConfigError, "stop: an empty string"),
    "stop without tokenizer": (
        ([1],),
        {"stop": ["x"]},
        dspark.PromptError,
        "stop: this checkpoint has no tokenizer.json",
    ),
    "bias": (
        ([1],),
        {"logit_bias": {256: 1.0}},
        dspark.PromptError,
        "logit_bias: 256 is not a token id",
    ),
    "all forbidden": (
        ([1],),
        {"forbidden_tokens": range(256)},
        dspark.ConfigError,
        "forbidden_tokens: all 256 tokens of the vocabulary are forbidden",
    ),
    "prefix": (([1],), {"prefix": [1]}, dspark.ConfigError, "prefix: expected a dspark.Session"),
    "gate": (
        ([1],),
        {"gate": True},
        dspark.ConfigError,
        "gate: expected a dspark.GateConfig, got bool",
    ),
    "gate number": (
        ([1],),
        {"gate": dspark.GateConfig(decay=2.0)},
        dspark.ConfigError,
        "gate decay: 2.0 must lie in 0..1",
    ),
    "min_draft": (
        ([1],),
        {"gate": dspark.GateConfig(min_draft=6)},
        dspark.ConfigError,
        "min_draft: 6 exceeds the draft block of 5",
    ),
    "stop id": (
        ([1],),
        {"stop_token_ids": [3, 256]},
        dspark.PromptError,
        "stop_token_ids: 256 is not a token id .0 to 255",
    ),
    "stop negative": (([1],), {"stop_token_ids": [-1]}, dspark.PromptError, "stop_token_ids: -1"),
    "stop text": (([1],), {"stop_token_ids": ["x"]}, dspark.PromptError, "stop_token_ids: 'x'"),
    "stop no list": (
        ([1],),
        {"stop_token_ids": 3},
        dspark.PromptError,
        "stop_token_ids: expected a list of token ids, got 3",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_compilation(golden_float, case):
    arguments, options, error, message = REFUSALS[case]
    options = options if len(arguments) > 1 else options | {"max_new_tokens": 4}
    with compilations() as compiled:
        with pytest.raises(error, match=message):
            dspark.generate(golden_float, *arguments, **options)
        with pytest.raises(error, match=message):
            dspark.stream(
                golden_float, *arguments, **options
            )  # at the call, not at the first event
    assert not compiled


def test_every_error_is_a_dspark_error():
    for error in (
        dspark.PromptError,
        dspark.ConfigError,
        dspark.CheckpointError,
        dspark.NumericsError,
    ):
        assert issubclass(error, dspark.DsparkError)


def test_forms_of_prompts(golden_float):
    model = dataclasses.replace(golden_float, tokenizer=byte_tokenizer())
    same = (
        [[1, 2, 3]],
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        np.array([[1, 2, 3]]),
        [np.array([1, 2, 3], np.int64)],
        [(1, 2, 3)],
        jnp.array([1, 2, 3]),
        jnp.array([[1, 2, 3]]),
        [jnp.array([1, 2, 3])],
        [jnp.int32(1), np.int64(2), np.array(3)],
        [[jnp.int32(1), np.int64(2), 3]],
    )
    assert all(encode(model, prompts) == [[1, 2, 3]] for prompts in same)
    assert encode(model, "ab") == encode(model, ["ab"]) == [[97, 98]]
    assert encode(model, ["a", [5], "\u00e9"]) == [[97], [5], [0xC3, 0xA9]]
    with pytest.raises(dspark.PromptError, match="prompt 0: the prompt is empty"):
        dspark.generate(model, "")


def test_a_beginning_that_stands_there_twice_is_warned_of(golden_float):
    """A text that begins with the token which the tokenizer puts before every text; not two of them
    in a text, nor one.
    """
    tokenizer, first = byte_tokenizer(), golden_float.config.bos_token_id
    token = tokenizer.id_to_token(first)
    tokenizer.add_special_tokens([AddedToken(token, special=True)])

    def ids(model, prompts):
        return [prompt.ids for prompt in make_request(model, prompts, max_new_tokens=4).prompts]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = dataclasses.replace(golden_float, tokenizer=tokenizer)
        assert ids(model, token * 2) == [(first, first)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, first)]
        )
        assert ids(model, "a") == [(first, 97)]
        assert ids(model, [[first, first]]) == [(first, first)]
    for prompts in (["a", token + "a"], np.array(["a", token + "a"])):
        with pytest.warns(UserWarning, match=re.escape(f"prompt 1 begins with {token}, and")) as w:
            assert ids(model, prompts)[1] == (first, first, 97)
        assert len(w) == 1


def test_an_empty_variable_of_the_gate_is_unset():
    names = ["", *("_" + field.name.upper() for field in dataclasses.fields(dspark.GateConfig))]
    empty = {"DEEPSEEK_DSPARK_GATE" + name: "" for name in names if name != "_ENABLED"}
    assert dspark.GateConfig.from_env(empty) == dspark.GateConfig()


def test_text_that_is_no_unicode_is_refused(golden_float):
    model = dataclasses.replace(golden_float, tokenizer=byte_tokenizer())
    for prompts, message in (
        ("\ud800", "prompt 0: character 0"),
        (["a", "bc\udcff"], "prompt 1: character 2, '.udcff'"),
    ):
        with pytest.raises(
            dspark.PromptError, match=message + ".*is no valid Unicode; give text in UTF-8"
        ):
            dspark.generate(model, prompts, 4)


def test_a_request_beyond_what_the_model_was_made_for_is_warned_of(golden_float):
    """It is served all the same: max_seq_len says what fits."""
    model = dataclasses.replace(
        golden_float, config=dataclasses.replace(golden_float.config, max_position_embeddings=20)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_request(model, [[1] * 16, [2] * 4], max_new_tokens=[4, 16])
    with pytest.warns(
        UserWarning, match="come to 21 tokens, the model was made for max_position_embeddings = 20"
    ):
        request = make_request(model, [[2], [1] * 16], max_new_tokens=5)
    assert [prompt.max_new_tokens for prompt in request.prompts] == [5, 5]


# Text

TEXTS = [
    "plain text, ends here",
    "na\u00efve \u65e5\u672c\u8a9e \U0001f642 caf\u00e9\n",
    "\U0001f642\U0001f642",
    " leading and  double  blanks",
    "\u65e5",
]


def pieces(model, tokens, sizes):
    text, shown = IncrementalText(model), []
    while tokens:
        size = next(sizes)
        part, tokens = tokens[:size], tokens[size:]
        shown.append(text.add(part, last=not tokens))
    return shown


@pytest.mark.parametrize("tokenizer", ["bytes", "embedded"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_text_add_up(golden_float, tokenizer, text):
    tokenizer = (
        byte_tokenizer()
        if tokenizer == "bytes"
        else Tokenizer.from_file(str(embedded_checkpoint() / "tokenizer.json"))
    )
    model = dataclasses.replace(golden_float, tokenizer=tokenizer)
    tokens = tokenizer.encode(text).ids
    assert decode(model, tokens) == text
    for step in (1, 2, 3, 5):
        shown = pieces(model, tokens, iter([step] * len(tokens)))
        assert "".join(shown) == text
        assert not any("\ufffd" in piece for piece in shown), (
            "a character is shown when it is whole"
        )


def test_broken_text_adds_up_too(golden_float):
    model, rng = (
        dataclasses.replace(golden_float, tokenizer=byte_tokenizer()),
        np.random.default_rng(3),
    )
    for _ in range(300):
        tokens = rng.choice(
            [0x41, 0x80, 0xBF, 0xC3, 0xE6, 0x97, 0xF0, 0x9F, 0x99, 0x82, 0xFF],
            size=rng.integers(1, 30),
        ).tolist()
        shown = pieces(model, tokens, iter(rng.integers(1, 5, len(tokens)).tolist()))
        assert "".join(shown) == bytes(tokens).decode(errors="replace") == decode(model, tokens)


def test_text_that_begins_otherwise_than_it_goes_on(golden_float):
    """Some tokenizers drop the blank before the first word: a piece must not be decoded as if it
    were the first.
    """
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(["\u2581one", "\u2581two", "\u2581three", "s"])},
            unk_token="s",
        )
    )
    tokenizer.decoder = decoders.Metaspace()
    model = dataclasses.replace(golden_float, tokenizer=tokenizer)
    assert pieces(model, [0, 3, 1, 2, 3], iter([1, 1, 1, 2])) == ["one", "s", " two", " threes"]


def test_an_unfinished_character_is_shown_at_the_end(golden_float):
    text = IncrementalText(dataclasses.replace(golden_float, tokenizer=byte_tokenizer()))
    assert [
        text.add([0x61]),
        text.add([0xF0, 0x9F]),
        text.add([0x99]),
        text.add([], last=True),
    ] == ["a", "", "", "\ufffd"]


def test_no_text_without_a_tokenizer(golden_float):
    assert IncrementalText(golden_float).add([1, 2], last=True) is None
