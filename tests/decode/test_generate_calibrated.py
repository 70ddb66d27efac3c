"""A calibration of the drafter acts on what the gate goes by, and on nothing else. The programs are
those of test_generate.py.
"""

import dataclasses

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.loading.calibration import Calibration, Scale

from helpers.ask_parts import GATES
from helpers.round_parts import BLOCK, compilations, scripted
from helpers.support import MAX_SEQ_LEN


@pytest.mark.parametrize("mode", ("sequential", "block"))
@pytest.mark.parametrize("gate", GATES[1:3], ids=lambda g: f"threshold{g.margin_threshold}")
def test_a_calibration_scales_what_the_gate_goes_by_and_nothing_else(
    scripted_model, prompts, plain, mode, gate
):
    """No token changes, records stay raw, nothing is compiled; from the records, the gate's
    functions over scaled scores give every choice and what the stats show.
    """
    script = np.random.default_rng(7).normal(2, 3, MAX_SEQ_LEN).astype(np.float32)
    loud = scripted(scripted_model, (), script)
    before = dspark.generate(loud, prompts[1], 75, mode, gate, stop_token_ids=[])
    scale = Scale((4.0, 2.0, 0.5, 8.0, 1.0), (-1.0, 0.5, -2.0, 0.0, 3.0))
    unlike = Scale((1.0,) * BLOCK, (9.0,) * BLOCK)
    calibrated = dataclasses.replace(loud, calibration=Calibration(scale, unlike))
    with compilations() as compiled:
        out = dspark.generate(calibrated, prompts[1], 75, mode, gate, stop_token_ids=[])
    assert not compiled and out.tokens == before.tokens == [plain[1]]
    state = dspark.gate.init(gate, 1)
    for record in out.rounds[0]:
        if record.skipped == "margin":
            state = dspark.gate.note_skipped(state, [True], [True])
            continue
        raw = np.array([record.confidence], np.float32)
        assert set(raw[0].tolist()) <= set(script.tolist())
        scores = dspark.gate.scaled(raw, *scale)
        n = dspark.gate.choose(gate, state, scores)
        assert record.verified == int(n[0])
        state = dspark.gate.observe(gate, state, scores, [record.accepted], n)
        state = dspark.gate.note_skipped(state, n == 0, [False])
    assert out.stats["gate"] == dspark.gate.stats(state) != before.stats["gate"]
    off = dataclasses.replace(gate, calibration=False)
    unused = dspark.generate(calibrated, prompts[1], 75, mode, off, stop_token_ids=[])
    assert unused.rounds == before.rounds and unused.stats["gate"] == before.stats["gate"]
