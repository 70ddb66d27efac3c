"""Ctrl-C is remembered, and nobody else's way of handling it is changed."""

import signal
import threading

import pytest

from dspark_jax.runtime.interrupts import watch_interrupts


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def handler():
    """handler(function): SIGINT's handler within the test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda function: signal.signal(signal.SIGINT, function)
    signal.signal(signal.SIGINT, before)


def test_it_is_raised_and_remembered():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), watch_interrupts() as interrupt:
        press()
    assert interrupt.seen and signal.getsignal(signal.SIGINT) is before
    with watch_interrupts() as interrupt:
        pass
    assert not interrupt.seen


def test_a_step_is_finished_first():
    before, steps = signal.getsignal(signal.SIGINT), 0
    with watch_interrupts(at_once=False) as interrupt:
        while not interrupt.seen:
            press()
            steps += 1
    assert steps == 1 and signal.getsignal(signal.SIGINT) is before


def test_a_step_in_hand_is_finished_around_a_watch_within_it():
    with watch_interrupts(at_once=False) as outer:
        with watch_interrupts() as inner:
            press()
    assert outer.seen and not inner.seen


@pytest.mark.parametrize("at_once", [True, False])
def test_a_handler_of_the_program_keeps_its_say(handler, at_once):
    calls = []
    handler(lambda number, frame: calls.append(number))
    with watch_interrupts(at_once) as interrupt:
        press()
    assert calls == [signal.SIGINT] and not interrupt.seen


def test_an_ignored_signal_stays_ignored(handler):
    handler(signal.SIG_IGN)
    with watch_interrupts(at_once=False) as interrupt:
        press()
    assert not interrupt.seen and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_changes_nothing():
    handlers = []

    def work():
        with watch_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]
