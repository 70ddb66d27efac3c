"""Replay of recorded rounds: what would the gate have gained on them?

A rounds file holds, per prompt, rounds that drafted and verified the whole block. Because each
round says how many drafts were right, every shorter choice can be judged afterwards. `replay` runs
the gate of `dspark_jax.decode.gate` over them causally, each prompt with a cold gate, and reports
tokens per second under four accountings:

* plain       one token per plain step;
* always_k    the whole block is verified in every round;
* published   the gate's choices; a round that it skips is charged plain_ms only, as the table
              published with the gate does;
* charged     the same choices; a skipped round is charged draft_ms + plain_ms, since its draft was
              already paid for.

A skipped round (n = 0) emits one token; a verified one min(accept, n) + 1. The file has no logit
margins, so `margin_threshold` has no effect here.

Rounds file (JSON; times in ms; `draft_ms`, `verify_ms`, `plain_ms` each in all rounds or in none):

    {"source": str, "note": str, "block_size": K,
     "scale": {"temperatures": [K numbers], "offsets": [K numbers]},
     "prompts": {name: [{"accept": 0..K, "k": K, "draft_ms": f, "verify_ms": f, "plain_ms": f,
     "conf": [K scores]}, ...]}}

Scores are raw. `scale`, which is left out where there is none, is by what the gate scales them: the
drafter's calibration at the time of the recording.
"""

import dataclasses
import json
import os
import statistics

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.paths import expanded, no_file
from dspark_jax.decode import gate, gate_config
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.loading import calibration
from dspark_jax.loading.calibration import Scale
from dspark_jax.runtime.files import write_text

ACCOUNTINGS = ("plain", "always_k", "published", "charged")
TIMES = ("draft_ms", "verify_ms", "plain_ms")
OVERALL = "overall"


def replay(source, config: gate_config.GateConfig | None = None) -> dict:
    """Replays a rounds file (path) or its parsed content (dict) under `config`, by default that of
    the environment.

    The gate is taken as enabled; draft and plain costs are the medians of all recorded rounds where
    the file has them, else the config's; verify(n) = verify_base_ms + verify_slope_ms * n of the
    config. Without a config, where no variable says what a verify costs either, and the defaults
    are far from the full verifies of the file: their median, whatever n is, since a verify of this
    library computes all K+1 rows.

    Returns a dict: for each of `ACCOUNTINGS` {prompt: tokens per second, ..., "overall":
    round-weighted}; `rounds` and `chosen` {prompt: count, [n, ...]}; `costs` in ms;
    `verify_costs_from`, "config" or "recording"; `recorded_verify_ms`, the median or None;
    `source`, `block_size`.
    Raises ConfigError for a file that is missing, malformed or recorded with the gate on.
    """
    recording = check(source) if isinstance(source, dict) else load(source)
    block, prompts = recording["block_size"], recording["prompts"]
    recorded, adapts = (
        _median(prompts, "verify_ms", None),
        config is None and not _says_what_a_verify_costs(os.environ),
    )
    config = gate_config.GateConfig.from_env() if config is None else config
    adapts = adapts and far_from(recorded, gate.verify_ms(config, block))
    if adapts:
        config = dataclasses.replace(config, verify_base_ms=recorded, verify_slope_ms=0)
    config = dataclasses.replace(
        config,
        enabled=True,
        draft_ms=_median(prompts, "draft_ms", config.draft_ms),
        plain_ms=_median(prompts, "plain_ms", config.plain_ms),
    )
    gate_config.validate(config, block)
    by = recording.get("scale") if config.calibration else None
    chosen = {name: _choices(config, rounds, by) for name, rounds in prompts.items()}
    ms = {
        name: _ms_per_token(config, rounds, chosen[name], block) for name, rounds in prompts.items()
    }
    return {
        "source": recording.get("source", ""),
        "block_size": block,
        "costs": {
            name: getattr(config, name)
            for name in ("draft_ms", "verify_base_ms", "verify_slope_ms", "plain_ms")
        },
        "verify_costs_from": "recording" if adapts else "config",
        "recorded_verify_ms": recorded,
        "rounds": {name: len(rounds) for name, rounds in prompts.items()},
        "chosen": chosen,
    } | {accounting: _rates(prompts, ms, accounting) for accounting in ACCOUNTINGS}


def _says_what_a_verify_costs(environ):
    return any(
        environ.get(f"{gate_config.ENV_PREFIX}_{field}")
        for field in ("VERIFY_BASE_MS", "VERIFY_SLOPE_MS")
    )


def far_from(recorded, assumed):
    """Whether an assumed cost of a full verify is not that of the recorded ones: the defaults
    describe one machine and model.
    """
    return recorded is not None and abs(assumed - recorded) > 0.25 * recorded


def _choices(config, rounds, by):
    """The gate's n of each round, from what it saw of the rounds before: list of int. by: `scale`
    of the file, or None.
    """
    state, chosen = gate.init(config, 1), []
    for record in rounds:
        confidence = jnp.asarray([record["conf"]], jnp.float32)
        if by is not None:
            confidence = gate.scaled(confidence, by["temperatures"], by["offsets"])
        n = gate.choose(config, state, confidence)
        accepted, never = jnp.minimum(n, record["accept"]), jnp.zeros((1,), bool)
        outcome = gate.Outcome(confidence, accepted, n, n, skipped=n == 0, by_margin=never)
        state = gate.learn(config, state, outcome)
        chosen.append(int(n[0]))
    return chosen


def _ms_per_token(config, rounds, chosen, block):
    """{accounting: ms per token} of one prompt."""

    def per_token(lengths, skipped_draft_ms=0.0):
        tokens = sum(min(record["accept"], n) + 1 for record, n in zip(rounds, lengths))
        ms = sum(gate.round_ms(config, n) + (0 if n else skipped_draft_ms) for n in lengths)
        return ms / tokens

    return {
        "plain": config.plain_ms,
        "always_k": per_token([block] * len(rounds)),
        "published": per_token(chosen),
        "charged": per_token(chosen, skipped_draft_ms=config.draft_ms),
    }


def _rates(prompts, ms, accounting):
    """{prompt: tokens/s, "overall": tokens/s of the ms per token averaged with the rounds as
    weights}.
    """
    weighted = sum(ms[name][accounting] * len(rounds) for name, rounds in prompts.items())
    overall = weighted / sum(map(len, prompts.values()))
    return {name: 1000 / ms[name][accounting] for name in prompts} | {OVERALL: 1000 / overall}


def _median(prompts, key, fallback):
    values = [record[key] for rounds in prompts.values() for record in rounds if key in record]
    return statistics.median(values) if values else fallback


def load(path) -> dict:
    """Reads and checks a rounds file. Raises ConfigError naming the file and the place in it."""
    path = expanded(path)
    if (other := no_file(path, pipe=True)) is not None:
        raise ConfigError(f"rounds file {path}: this is {other}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"rounds file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"rounds file {path} is not JSON: {error}") from error
    return check(content, f"rounds file {path}")


def check(content, where="rounds") -> dict:
    """Returns `content` if it is a complete recording, else raises ConfigError naming the prompt,
    round and key.
    """
    _require(isinstance(content, dict), where, "the top level must be an object")
    block, prompts = content.get("block_size"), content.get("prompts")
    _require(
        _is_int(block) and block >= 1,
        where,
        f"block_size must be a whole number of 1 or more, not {block!r}",
    )
    _require(
        isinstance(prompts, dict) and prompts,
        where,
        "prompts must be an object of one or more lists of rounds",
    )
    if "scale" in content:
        _check_scale(content["scale"], block, where)
    _require(OVERALL not in prompts, where, f"a prompt must not be named {OVERALL!r}")
    for name, rounds in prompts.items():
        _require(
            isinstance(rounds, list) and rounds,
            f"{where}, prompt {name!r}",
            "must be a list of one or more rounds",
        )
        for i, record in enumerate(rounds):
            _check_round(record, block, f"{where}, prompt {name!r}, round {i}")
    for key in TIMES:
        present = [key in record for rounds in prompts.values() for record in rounds]
        _require(
            all(present) or not any(present), where, f"{key} must be in every round or in none"
        )
    return content


def _check_scale(values, block, where):
    try:
        calibration.scale(f"{where}: scale", values, block)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _check_round(record, block, where):
    _require(isinstance(record, dict), where, "must be an object")
    for key in ("accept", "k", "conf"):
        _require(key in record, where, f"{key} is missing")
    k, accept, conf = record["k"], record["accept"], record["conf"]
    _require(
        _is_int(k) and k == block,
        where,
        f"k is {k!r}, not the block of {block}; record with the gate off",
    )
    _require(
        _is_int(accept) and 0 <= accept <= k,
        where,
        f"accept must be a whole number in 0..{k}, not {accept!r}",
    )
    finite = (
        isinstance(conf, list) and len(conf) == block and all(_is_finite(score) for score in conf)
    )
    _require(finite, where, f"conf must be a list of {block} finite numbers, not {conf!r}")
    for key in TIMES:
        if key in record:
            _require(
                _is_finite(record[key]) and record[key] >= 0,
                where,
                f"{key} must be a time in ms, not {record[key]!r}",
            )


def _require(condition, where, message):
    if not condition:
        raise ConfigError(f"{where}: {message}")


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value):
    """A number in JSON may be an integer that no float can hold."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and gate_config.is_finite(value)
    )


class RoundsRecorder:
    """Collects the rounds of an own run, drafted with the gate off, and writes them as a rounds
    file.

    scale: by what the gate scales the scores of these rounds, None: it takes them as they are.
    """

    def __init__(self, block_size: int, source: str, note: str = "", scale: Scale | None = None):
        self.content = {
            "source": source,
            "note": note,
            "block_size": int(block_size),
            "prompts": {},
        }
        if scale is not None:
            columns = {name: list(column) for name, column in scale._asdict().items()}
            self.content["scale"] = columns

    def add(self, prompt: str, records, draft_ms=None, verify_ms=None, plain_ms=None) -> None:
        """Adds the RoundRecords of one prompt; a repeated prompt name is continued.

        Each time is a number (a mean, written into every round), a sequence with one entry per
        record, or None (not measured: the key is left out). The last rounds, if the end of the
        cache cut them short, are left out: they do not say what became of the drafts they did not
        verify. Raises ConfigError for any other round that did not verify the whole block.
        """
        records = list(records)
        columns = {
            key: _column(key, value, records)
            for key, value in zip(TIMES, (draft_ms, verify_ms, plain_ms))
        }
        whole = records[: _count_before_the_end(records, self.content["block_size"])]
        rounds = [self._round(prompt, i, record, columns) for i, record in enumerate(whole)]
        self.content["prompts"].setdefault(prompt, []).extend(rounds)

    def _round(self, prompt, i, record, columns):
        block = self.content["block_size"]
        if record.skipped or record.verified != block:
            raise ConfigError(
                f"round {i} of prompt {prompt!r} verified {record.verified} of {block} drafts: "
                "only rounds that verify the whole "
                "block can be replayed; record with the gate off"
            )
        times = {key: column[i] for key, column in columns.items() if column is not None}
        conf = [round(float(score), 6) for score in record.confidence]
        return {"accept": int(record.accepted), "k": block} | times | {"conf": conf}

    def write(self, path) -> None:
        """Writes the file, replacing it in one step. Raises ConfigError if nothing was recorded or
        the path cannot be written.
        """
        content = dict(
            self.content,
            prompts={name: rounds for name, rounds in self.content["prompts"].items() if rounds},
        )
        if not content["prompts"]:
            raise ConfigError(
                "recorded rounds: no round verified the whole block, so there is nothing to "
                "replay; record a longer output, or load with a larger max_seq_len"
            )
        check(content, "recorded rounds")
        try:
            write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(f"rounds file {path} cannot be written: {error.strerror}") from error


def _count_before_the_end(records, block):
    """How many rounds come before those that the end of the cache cut short.

    There each round has room for accepted + 1 drafts fewer than the one before it, which tells them
    from a gate's choices.
    """
    count = len(records)
    while count and not records[count - 1].skipped and records[count - 1].verified < block:
        last = records[count - 1]
        if count < len(records) and last.verified - last.accepted - 1 != records[count].verified:
            break
        count -= 1
    return count


def _column(key, value, records):
    """A time as one float per record, or None."""
    if value is None:
        return None
    column = (
        [float(value)] * len(records) if np.ndim(value) == 0 else [float(entry) for entry in value]
    )
    if len(column) != len(records):
        raise ConfigError(f"{key} has {len(column)} entries for {len(records)} rounds")
    return column
