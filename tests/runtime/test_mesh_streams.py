"""generate() of several prompts on a mesh: as many at a time as it has data rows, and each exactly
as alone.
"""

import pytest

from dspark_jax.decode.stats import PromptRun, collect

from helpers.processes import finish, start


@pytest.mark.heavy
def test_prompts_at_a_time_are_as_alone():
    finish(start("stream_parts.py", 4, "streams"))


def test_seconds_of_prompts_that_run_together():
    """The second of a pair ended first; the fifth had the mesh to itself."""
    ran = (6, 3.0), (2, 1.0), (2, 1.0), (4, 2.0), (9, 0.5)
    runs = [PromptRun(3, tokens=[7] * count, seconds=seconds) for count, seconds in ran]
    stats = collect(runs, 5, 0.0, together=2)
    assert (stats["tokens"], stats["seconds"], stats["tokens_per_second"]) == (23, 5.5, 23 / 5.5)
    assert [prompt["seconds"] for prompt in stats["per_prompt"]] == [3.0, 1.0, 1.0, 2.0, 0.5]
    assert [prompt["tokens_per_second"] for prompt in stats["per_prompt"]] == [
        2.0,
        2.0,
        2.0,
        2.0,
        18.0,
    ]
    assert collect(runs, 5, 0.0)["seconds"] == 7.5
