"""generate() of several prompts on a mesh: each exactly as alone, whatever runs on its row of the
data axis and on others.
"""

import pytest

from dspark_jax.decode.stats import PromptRun, collect

from helpers.processes import finish, start


@pytest.mark.heavy
def test_prompts_at_a_time_are_as_alone():
    finish(start("stream_parts.py", 4, "streams"))


def test_seconds_of_prompts_that_run_together():
    """Each has its own; all together take less than their sum."""
    ran = (
        (6, 3.0, 0.5),
        (2, 1.0, 0.5),
        (2, 1.0, 0.25),
        (4, 2.0, 0.5),
        (9, 0.5, 0.25),
        (1, 0.25, 0.25),
    )
    runs = [
        PromptRun(3, tokens=[7] * count, seconds=seconds, first_seconds=first)
        for count, seconds, first in ran
    ]
    stats = collect(runs, 5, 0.0, 5.5, streams=2, slot_rounds=40, worked=30)
    assert (stats["tokens"], stats["seconds"], stats["tokens_per_second"]) == (24, 5.5, 24 / 5.5)
    assert (stats["streams"], stats["busy_share"]) == (2, 0.75)
    assert [prompt["seconds"] for prompt in stats["per_prompt"]] == [3.0, 1.0, 1.0, 2.0, 0.5, 0.25]
    assert [prompt["tokens_per_second"] for prompt in stats["per_prompt"]] == [
        2.0,
        2.0,
        2.0,
        2.0,
        18.0,
        4.0,
    ]
    per_token = [0.5, 0.5, 0.75, 0.5, 0.03125, None]
    assert [prompt["time_per_token"] for prompt in stats["per_prompt"]] == per_token
    assert stats["time_per_token"] == sum(per_token[:5]) / 5, "of those with more than one token"
    assert [prompt["time_to_first_token"] for prompt in stats["per_prompt"]] == [
        first for _, _, first in ran
    ]
    assert stats["time_to_first_token"] == 0.375
    nothing = collect([PromptRun(3)], 5, 0.0, 0.0)
    assert [nothing[key] for key in ("busy_share", "time_per_token", "time_to_first_token")] == [
        None
    ] * 3
