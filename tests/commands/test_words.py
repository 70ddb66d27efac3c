"""Words that the shell took apart: the command says that they belong together."""

import pytest

from dspark_jax.commands.main import main


@pytest.fixture
def said(capsys):
    """said(*arguments) -> what argparse says of them."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        assert stop.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "words", [["hi", "there"], ["hi", "--json", "there"], ["--seed", "3", "hi", "there"]]
)
def test_a_prompt_of_several_words(said, words):
    err = said("generate", *words)
    assert err.startswith("usage: dspark generate [-h]")
    assert err.endswith(
        "dspark generate: error: unrecognized arguments: there; a prompt of several words must be "
        'quoted: "hi there"\n'
    )


def test_ids_of_several_words(said):
    err = said("generate", "--prompt-ids", "5", "6", "7")
    assert err.startswith("usage: dspark generate [-h]")
    assert err.endswith('; ids are one argument, such as "5 6 7" or 5,6,7\n')


@pytest.mark.parametrize("flag", ["--stop", "--forbid"])
def test_a_token_that_is_empty(capsys, flag):
    """As from a variable of the shell that is not set."""
    assert main(["generate", "hi", flag, ""]) == 2
    assert capsys.readouterr().err == (
        f"dspark generate: {flag} '': this is empty; give a token's id or its text\n"
    )


@pytest.mark.parametrize(
    "command, spare",
    [
        (["inspect", "a", "b"], "b"),
        (["replay", "a", "b"], "b"),
        (["bench", "a"], "a"),
        (["plan", "a"], "a"),
        (["generate", "hi", "-x"], "-x"),
    ],
)
def test_what_a_command_does_not_take_is_its_own_error(said, command, spare):
    err = said(*command)
    assert err.startswith(f"usage: dspark {command[0]} [-h]")
    assert err.endswith(f"dspark {command[0]}: error: unrecognized arguments: {spare}\n")
