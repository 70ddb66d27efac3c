"""A stage of training as its user sees it: the loop with a log, a bar and a line now and then."""

from __future__ import annotations

from collections.abc import Callable

from dspark_jax.train import loop, show, states


def fit(
    task: loop.Task,
    values: loop.Params,
    options,
    figures: Callable[[dict, dict], dict],
    described: Callable[[dict, dict], str],
) -> loop.Params:
    """`loop.fit` from options.run / the task's name, logged to NAME.jsonl beside it.

    options: run, rows, length, devices and save_every of either kind of training. Both functions
    get a step's measures and their averages over the last steps: figures says what the log holds
    of the step, "loss" at least, described what the terminal is told.
    """
    state = options.run / task.name
    done = states.newest(state) or 0
    log = loop.Log(options.run / f"{task.name}.jsonl", done)
    smooth, clock = show.Smooth(), show.Clock()
    with show.bar(task.name, task.steps, done) as move:

        def report(step, measures):
            seconds = clock()
            averages = smooth.add({k: v for k, v in measures.items() if not isinstance(v, dict)})
            line = figures(measures, averages)
            log.write(step=step, seconds=seconds, **line)
            speed = options.rows * options.length / seconds
            move(1, f"loss {line['loss']:.3f} | {speed:.0f} tokens/s")
            if show.is_line(step, task.steps):
                show.say(f"step {step}/{task.steps}: {described(measures, averages)}")

        mesh = loop.data_mesh(options.devices)
        return loop.fit(task, values, state, report, options.save_every, mesh=mesh)
