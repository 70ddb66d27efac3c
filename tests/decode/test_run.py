"""The driver of a run on an engine that says what a test wants: text, ends, seconds, Ctrl-C."""

import dataclasses
import signal
import time
import types

import pytest

from dspark_jax.decode import run as runs
from dspark_jax.decode.emission import Emission, RoundRecord
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.request import Prompt, Request
from dspark_jax.decode.state import ROUNDS_PER_CALL
from dspark_jax.errors import DsparkError, NumericsError

from helpers.round_parts import byte_tokenizer

SAYS = ["a\u00efve", "b", "\u65e5\u672c"]  # what each prompt is continued with, in bytes
MODEL = types.SimpleNamespace(
    tokenizer=byte_tokenizer(),
    config=types.SimpleNamespace(dspark_block_size=5),
    mesh=None,
)
ASKED = Prompt(
    ids=(1,),
    max_new_tokens=9,
    stop_token_ids=frozenset({ord("b")}),
    stop=(),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    index=0,
    bias=(),
)
RECORD = RoundRecord(5, 5, 1, (0.5,) * 5, 1.0, "")


class TwoAtOnce:
    """Two places for streams, in turn, two tokens an emission; a prompt that waits takes the place
    of one that ended. `before` is called before each emission.
    """

    width, compile_seconds, slot_rounds, worked = 2, 0.5, 8, 7
    before = staticmethod(lambda emission: None)

    def __init__(self, model, request):
        self.calls, self.ended = [], []
        self.started, self.failures = {}, {}

    def stream(self, rounds_per_call, longest_first):
        self.calls.append((rounds_per_call, longest_first))
        left = {number: list(says.encode()) for number, says in enumerate(SAYS)}
        while left:
            for number in list(left)[: self.width]:
                self.started.setdefault(number, time.perf_counter())
                tokens, left[number] = left[number][:2], left[number][2:]
                emission = Emission(number, tokens, RECORD, not left[number])
                self.before(emission)
                yield emission
                if number in self.ended or not left[number]:
                    del left[number]

    def end(self, number):
        self.ended.append(number)

    def gate_of(self, number):
        return None


@pytest.fixture
def engine(monkeypatch):
    engine = type("Engine", (TwoAtOnce,), {})
    monkeypatch.setattr(runs, "Engine", engine)
    monkeypatch.setattr(runs, "check_room", lambda model, request: None)
    return engine


def make(by_round=False, with_text=False, **asked):
    prompts = (dataclasses.replace(ASKED, **asked),) * 3
    request = Request(prompts, "block", GateConfig(), 2, None, False)
    return runs.Run(MODEL, request, by_round, with_text)


def whole(number):
    return list(SAYS[number].encode())


@pytest.mark.parametrize("by_round", [False, True])
@pytest.mark.parametrize("with_text", [False, True])
def test_all_that_the_engine_says_is_kept(engine, by_round, with_text):
    run, seen = make(by_round, with_text), []
    run.complete(seen.append)
    in_turn = by_round or with_text
    assert run.engine.calls == [(None if by_round else ROUNDS_PER_CALL, not in_turn)]
    assert not run.interrupted
    assert [emission.prompt for emission in seen] == [0, 1, 0, 2, 0, 2, 2]
    out = run.output()
    assert out.tokens == [whole(0), whole(1), whole(2)] and out.texts == SAYS
    assert out.finish_reasons == ["length", "stop", "length"]
    assert out.stop_reasons == [None, ord("b"), None]
    assert out.rounds == [[RECORD] * 3, [RECORD], [RECORD] * 3]
    seconds = [run.seconds for run in run.prompts]
    assert seconds[0] > seconds[1] > 0, "each until its own last token"
    assert out.stats["seconds"] > max(seconds), "from the first prefill to the last token"
    started = run.engine.started[2] - run.engine.started[0]
    assert out.stats["seconds"] > started + seconds[2], "the third prompt had waited"
    assert (out.stats["tokens"], out.stats["compile_seconds"]) == (12, 0.5)
    assert (out.stats["streams"], out.stats["busy_share"]) == (2, 7 / 8)


def test_emissions_carry_the_text_of_their_own_prompt(engine):
    """A character is shown when its last byte has come, whatever another stream says meanwhile."""
    texts = {number: [] for number in range(3)}
    for emission in make(with_text=True):
        texts[emission.prompt].append(emission.text)
    assert texts == {0: ["a", "\u00efv", "e"], 1: ["b"], 2: ["", "\u65e5", "\u672c"]}
    assert {emission.text for emission in make()} == {None}


@pytest.mark.parametrize("with_text", [False, True])
def test_a_stop_string_ends_one_stream(engine, with_text):
    """In the middle of what was emitted. The engine hears of it and goes on with the others."""
    run, seen = make(with_text=with_text, stop=("\u00ef", "x")), []
    run.complete(seen.append)
    out = run.output()
    assert run.engine.calls == [(1, not with_text)], "nothing is computed for nothing"
    assert run.engine.ended == [0]
    assert out.tokens == [whole(0)[:3], whole(1), whole(2)]
    assert out.texts == ["a", *SAYS[1:]]
    assert out.finish_reasons == ["stop", "stop", "length"]
    assert out.stop_reasons == ["\u00ef", ord("b"), None]
    assert [(e.tokens, e.last) for e in seen if e.prompt == 0] == [
        (whole(0)[:2], False),
        (whole(0)[2:3], True),
    ]
    assert seen[-1].text == ("\u672c" if with_text else None)


def interrupt(count, calls):
    """Called for the count-th time, it raises KeyboardInterrupt."""

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == count:
            raise KeyboardInterrupt

    return call


@pytest.mark.parametrize("where", ["engine", "caller"])
def test_ctrl_c_keeps_what_was_emitted(engine, where):
    """Between two emissions of the third prompt, or while the caller has one in hand."""
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
            raise DsparkError("a process was lost")

    engine.before = staticmethod(before)
    run = make()
    with pytest.raises(DsparkError, match="a process was lost"):
        run.complete()
    tokens = [run.tokens for run in run.prompts]
    assert tokens == [whole(0)[:4], whole(1), []] and not run.interrupted


def test_what_is_not_finite_is_an_error_when_the_others_have_ended(engine):
    run = make(with_text=True)
    run.compile()

    def before(emission):
        if emission.prompt == 0 and emission.last:
            run.engine.failures |= {2: "prompt 2: strange", 0: "prompt 0: not finite"}

    engine.before = staticmethod(before)
    with pytest.raises(NumericsError, match="^prompt 0: not finite .so ended prompts 2 too.$") as e:
        run.complete()
    out = e.value.output
    assert out.tokens == [whole(0), whole(1), whole(2)] and out.texts == SAYS
    assert out.finish_reasons == ["error", "stop", "error"]


def test_the_engine_is_made_once(engine):
    run = make()
    run.compile()
    before = run.engine
    run.complete()
    assert run.engine is before and len(before.calls) == 1
