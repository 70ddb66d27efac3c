"""The driver of a run on an engine that says what a test wants: groups, text, seconds, Ctrl-C."""

import signal
import types

import pytest

from dspark_jax.decode import run as runs
from dspark_jax.decode.engine import Emission, RoundRecord
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.request import Request
from dspark_jax.errors import NumericsError

from helpers.round_parts import byte_tokenizer

SAYS = ["a\u00efve", "b", "\u65e5\u672c"]  # what each prompt is continued with, in bytes
MODEL = types.SimpleNamespace(
    tokenizer=byte_tokenizer(),
    config=types.SimpleNamespace(dspark_block_size=5),
    mesh=None,
)
REQUEST = Request(((1,), (2, 2), (3,)), 9, "block", GateConfig(), frozenset({ord("b")}))
RECORD = RoundRecord(5, 5, 1, (0.5,) * 5, 1.0, "")


class TwoAtOnce:
    """Two streams at a time, in turn, two tokens an emission; `before` is called before each."""

    width, compile_seconds = 2, 0.5
    before = staticmethod(lambda emission: None)

    def __init__(self, model, request):
        self.groups = []

    def stream(self, numbers, rounds_per_call):
        self.groups.append((list(numbers), rounds_per_call))
        left = {number: list(SAYS[number].encode()) for number in numbers}
        while any(left.values()):
            for number in [n for n, tokens in left.items() if tokens]:
                tokens, left[number] = left[number][:2], left[number][2:]
                emission = Emission(number, tokens, RECORD, not left[number])
                self.before(emission)
                yield emission

    def gate_of(self, place):
        return None


@pytest.fixture
def engine(monkeypatch):
    engine = type("Engine", (TwoAtOnce,), {})
    monkeypatch.setattr(runs, "Engine", engine)
    return engine


def make(with_text=False):
    return runs.Run(MODEL, REQUEST, rounds_per_call=7, with_text=with_text)


def whole(number):
    return list(SAYS[number].encode())


@pytest.mark.parametrize("with_text", [False, True])
def test_prompts_run_in_groups_and_all_is_kept(engine, with_text):
    run, seen = make(with_text), []
    run.complete(seen.append)
    assert run._engine.groups == [([0, 1], 7), ([2], 7)] and not run.interrupted
    assert [emission.prompt for emission in seen] == [0, 1, 0, 0, 2, 2, 2]
    out = run.output()
    assert out.tokens == [whole(0), whole(1), whole(2)] and out.texts == SAYS
    assert out.finish_reasons == ["length", "stop", "length"]
    assert out.rounds == [[RECORD] * 3, [RECORD], [RECORD] * 3]
    seconds = [run.seconds for run in run.prompts]
    assert seconds[0] > seconds[1] > 0, "each until its own last token"
    assert out.stats["seconds"] == seconds[0] + seconds[2]
    assert (out.stats["tokens"], out.stats["compile_seconds"]) == (12, 0.5)


def test_emissions_carry_the_text_of_their_own_prompt(engine):
    """A character is shown when its last byte has come, whatever another stream says meanwhile."""
    texts = {number: [] for number in range(3)}
    for emission in make(with_text=True):
        texts[emission.prompt].append(emission.text)
    assert texts == {0: ["a", "\u00efv", "e"], 1: ["b"], 2: ["", "\u65e5", "\u672c"]}
    assert {emission.text for emission in make()} == {None}


def interrupt(count, calls):
    """Called for the count-th time, it raises KeyboardInterrupt."""

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == count:
            raise KeyboardInterrupt

    return call


@pytest.mark.parametrize("where", ["engine", "caller"])
def test_ctrl_c_keeps_what_was_emitted(engine, where):
    """Between two emissions of the second group, or while the caller has one in hand."""
    run = make(with_text=True)
    if where == "engine":
        engine.before = staticmethod(interrupt(6, []))
    run.complete(interrupt(5, []) if where == "caller" else None)
    out = run.output()
    assert run.interrupted and out.finish_reasons == ["length", "stop", "interrupted"]
    assert out.tokens == [whole(0), whole(1), whole(2)[:2]] and len(out.rounds[2]) == 1
    assert out.texts[2] == "", "the bytes of an unfinished character were not shown"
    assert run.prompts[2].seconds > 0


def test_ctrl_c_that_python_dropped_ends_the_run(engine):
    """Within a callback of the runtime no exception reaches anybody."""
    seen = []

    def each(emission):
        seen.append(emission)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass

    run = make()
    run.complete(each)
    assert run.interrupted and len(seen) == 1 and run.output().tokens == [whole(0)[:2], [], []]


def test_ctrl_c_before_anything_ran(engine, monkeypatch):
    monkeypatch.setattr(engine, "__init__", interrupt(1, []))
    run = make()
    run.complete()
    out = run.output()
    assert run.interrupted and out.tokens == [[], [], []]
    assert out.finish_reasons == ["interrupted"] * 3 and out.stats["compile_seconds"] == 0


def test_an_error_leaves_what_was_emitted(engine):
    def before(emission):
        if emission.prompt == 2:
            raise NumericsError("not finite")

    engine.before = staticmethod(before)
    run = make()
    with pytest.raises(NumericsError):
        run.complete()
    assert [run.tokens for run in run.prompts] == [whole(0), whole(1), []] and not run.interrupted


def test_the_engine_is_made_once(engine):
    run = make()
    run.compile()
    before = run._engine
    run.complete()
    assert run._engine is before and len(before.groups) == 2
