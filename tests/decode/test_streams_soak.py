"""The table of streams on the embedded checkpoint, sequential in 1 and 4 places
(test_streams_full.py has the other modes); and one stream of 4,000 tokens beside many short ones.
"""

import pytest

from helpers.ask_parts import Ask, answers, differing
from helpers.table_parts import DRAWN, alone, check_mode, load, text_ids

pytestmark = pytest.mark.heavy
LONG = 4000


def test_every_stream_has_the_bits_that_it_has_alone():
    model = load(512)
    check_mode(model, alone(model), "sequential")


@pytest.mark.parametrize("drawn", [DRAWN | {"seed": 1}], ids=["drawn"])
def test_a_long_stream_beside_others(drawn):
    """It is prefilled first and ends last; 60 others come and go beside it."""
    model = load(LONG + 64)
    ids = text_ids(model)
    long = Ask(ids[:50], LONG, **drawn)
    others = [Ask(ids[n : 2 * n], 10 + 3 * n, **DRAWN, seed=n) for n in range(1, 61)]
    got = answers(model, [long, *others], "block", 4)
    assert len(got[0].tokens) == LONG
    assert sum(len(answer.rounds) for answer in got[1:]) > len(got[0].rounds) / 2
    assert not differing(got, answers(model, [long, *others], "plain", 1))
