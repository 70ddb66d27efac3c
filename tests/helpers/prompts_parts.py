"""Files of prompts for the tests of `dspark generate --prompts`, and what their results hold."""

import json

from helpers.support import MAX_SEQ_LEN

LINES = ["Ab", "one two three", "x" * 40, "\u00e9t\u00e9", "12 34"]
SIZES = ["--max-new-tokens", "12", "--max-seq-len", str(MAX_SEQ_LEN), "--streams", "2"]
USUAL = [*SIZES, "--temperature", "0.9", "--top-p", "0.95", "--seed", "7"]
AS_USUAL = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "streams": 2}
LENGTHS = [3, 12, 5, 20, 8]  # of JSON lines: the second and the fourth are the last to end


def text_file(path):
    path.write_text("\n".join(LINES) + "\n", "utf-8")


def json_file(path, **settings):
    """The prompts with lengths of their own, and settings: name -> one value a line."""
    rows = [{"prompt": prompt, "max_new_tokens": length} for prompt, length in zip(LINES, LENGTHS)]
    for name, values in settings.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def parsed(text):
    return [json.loads(line) for line in text.splitlines()]


def lasting(text):
    """The results without their times."""
    return [{k: v for k, v in result.items() if k != "stats"} for result in parsed(text)]


def resumed(command, here, text, *arguments):
    """(status, text of the file after it, standard error) of a run that finds this text."""
    (here / "r").write_text(text)
    asked = ["--prompts", "p.jsonl", "--output", "r", "--resume", *arguments]
    status, out, err = command(*asked)
    assert out == ""
    return status, (here / "r").read_text(), err
