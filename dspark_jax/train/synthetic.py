"""Generated training text: counting, cycles, sums, and short Python functions. Seeded, unlimited,
ours.

Every generator takes a `numpy.random.Generator` and returns one document (str). Lengths are random
and long enough that an end is never the likeliest next token, so a greedy continuation goes on.
"""

from collections.abc import Callable

import numpy as np

from dspark_jax.train import snippets

Rng = np.random.Generator

THEMES = (
    "red green blue yellow black white orange purple pink brown grey silver gold",
    "monday tuesday wednesday thursday friday saturday sunday",
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "January February March April May June July August September October November December",
    "one two three four five six seven eight nine ten",
    "cat dog bird fish horse cow sheep mouse lion bear wolf fox",
    "apple pear plum cherry lemon grape peach melon",
    "north east south west",
    "spring summer autumn winter",
    "up down left right",
    "tick tock",
    "yes no",
    "on off",
    "ping pong",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    "do re mi fa sol la ti",
    "alpha beta gamma delta",
    "sun moon star sky",
    "bread milk butter cheese salt sugar tea",
)
NOUNS = (
    "house garden river letter mother father sister brother friend door window table road hill "
    "tree book song day night morning evening room paper story city king queen child stone water "
    "fire hand heart word ship sea light"
).split()
VERBS = (
    "saw found heard followed remembered opened carried left watched loved wanted made took gave "
    "kept passed"
).split()
ADJECTIVES = (
    "old little great quiet happy dark bright long cold kind young white small fine poor good "
    "warm strange"
).split()
WORDS = sorted({*NOUNS, *VERBS, *ADJECTIVES, *" ".join(THEMES).split()})
LETTERS = list("abcdefghijklmnopqrstuvwxyz")


def _pick(rng: Rng, items):
    return items[int(rng.integers(len(items)))]


def counting(rng: Rng) -> str:
    """Numbers that rise (seldom fall) by a fixed step: mostly by 1, from 1 or from anywhere below
    1,000.
    """
    step = int(rng.choice([1, 1, 1, 1, 1, 1, 1, 2, 5, 10, 3, -1]))
    start = _pick(rng, (1, 0, *(int(rng.integers(1, below)) for below in (30, 120, 1000, 1000))))
    if step < 0:
        start = int(rng.integers(40, 300))
    elif step > 1 and rng.random() < 0.6:
        start = step * int(rng.integers(0, 20))
    end = max(start + step * int(rng.integers(30, 110)), -1)
    separator = str(rng.choice([" ", " ", " ", ", ", "\n"]))
    return separator.join(str(n) for n in range(start, end, step))


def _sentence(rng: Rng) -> str:
    forms = (
        lambda: (
            f"the {_pick(rng, ADJECTIVES)} {_pick(rng, NOUNS)} {_pick(rng, VERBS)} the "
            f"{_pick(rng, NOUNS)}"
        ),
        lambda: (
            f"my {_pick(rng, NOUNS)} {_pick(rng, VERBS)} a {_pick(rng, ADJECTIVES)} "
            f"{_pick(rng, NOUNS)}"
        ),
        lambda: (
            f"a {_pick(rng, NOUNS)} and a {_pick(rng, NOUNS)} {_pick(rng, VERBS)} the "
            f"{_pick(rng, ADJECTIVES)} {_pick(rng, NOUNS)}"
        ),
    )
    text = _pick(rng, forms)()
    return text[0].upper() + text[1:] + "." if rng.random() < 0.7 else text


def _words(rng: Rng) -> list[str]:
    """2 to 24 words, letters, numbers or names of one kind, in which the same one may come twice
    when there are many.
    """
    kind, size = rng.random(), int(rng.choice([2, 3, 3, 3, 4, 4, 5, 6, 7, 9, 12, 16, 24]))
    if kind < 0.4:
        words = _pick(rng, THEMES).split()
        at = int(rng.integers(len(words)))
        return (words[at:] + words[:at] if rng.random() < 0.5 else list(rng.permutation(words)))[
            :size
        ]
    if kind < 0.75:
        return list(rng.choice(WORDS, size, replace=size > 7))
    if kind < 0.85:
        return ["".join(rng.choice(LETTERS, int(rng.integers(1, 5)))) for _ in range(size)]
    return [str(n) for n in rng.integers(0, int(rng.choice([10, 100, 1000])), size)]


def cycle(rng: Rng) -> str:
    """A few words, or one to three sentences, again and again. Long units matter: only where a unit
    comes round for the first time is there something to learn about looking back.
    """
    if rng.random() < 0.25:
        unit, separator = (
            [_sentence(rng) for _ in range(int(rng.choice([1, 1, 2, 3])))],
            str(rng.choice([" ", " ", "\n", "\n\n"])),
        )
    else:
        unit, separator = _words(rng), str(rng.choice([" ", " ", " ", ", ", "\n", " - "]))
    length = len(separator.join(unit)) + len(separator)
    return separator.join(unit * max(3, int(rng.integers(150, 600)) // length))


def sums(rng: Rng) -> str:
    """Lines of small sums with their answers, one style a document; times tables; doublings;
    squares.
    """
    style, lines = rng.random(), []
    if style < 0.2:
        n, sign = int(rng.integers(2, 13)), _pick(rng, ("x", "*"))
        return "\n".join(f"{n} {sign} {i} = {n * i}" for i in range(1, int(rng.integers(12, 30))))
    if style < 0.3:
        n = int(rng.integers(1, 100))
        return "\n".join(
            f"{n} + {i} = {n + i}"
            for i in range(int(rng.integers(0, 3)), int(rng.integers(15, 30)))
        )
    if style < 0.35:
        return "\n".join(f"{i} squared is {i * i}" for i in range(int(rng.integers(1, 5)), 30))
    if style < 0.45:
        return "\n\n".join(_word_problem(rng) for _ in range(6))
    top = int(rng.choice([10, 20, 100]))
    op = _pick(rng, ("+", "+", "-", "mixed"))
    form = _pick(
        rng,
        (
            "{a} {o} {b} = {c}",
            "{a} {o} {b} = {c}",
            "{a}{o}{b}={c}",
            "What is {a} {o} {b}? {c}.",
            "Q: {a} {o} {b}\nA: {c}",
        ),
    )
    for _ in range(int(rng.integers(15, 30))):
        a, b = (int(n) for n in rng.integers(0, top, 2))
        sign = _pick(rng, ("+", "-")) if op == "mixed" else op
        if sign == "-":
            a, b = max(a, b), min(a, b)
        lines.append(form.format(a=a, b=b, o=sign, c=a + b if sign == "+" else a - b))
    return "\n".join(lines)


def _word_problem(rng: Rng) -> str:
    name = _pick(rng, ("Tom", "Anna", "Ben", "Emma", "Jane", "John"))
    thing = _pick(rng, ("apples", "books", "stones", "letters", "pens"))
    a, b = (int(n) for n in rng.integers(2, 20, 2))
    if rng.random() < 0.5:
        return (
            f"{name} has {a} {thing} and finds {b} more. Now {name} has {a} + {b} = {a + b} "
            f"{thing}."
        )
    a, b = max(a, b), min(a, b)
    return f"{name} has {a} {thing} and gives away {b}. Now {name} has {a} - {b} = {a - b} {thing}."


def _class(rng: Rng) -> str:
    name = _pick(rng, ("Point", "Person", "Counter", "Node", "Account", "Item", "Box", "User"))
    names = ["x", "y", "name", "value", "size", "count", "left", "right", "owner", "items"]
    fields = list(rng.choice(names, int(rng.integers(1, 4)), replace=False))
    lines = [
        f"class {name}:",
        f"    def __init__(self, {', '.join(fields)}):",
        *(f"        self.{f} = {f}" for f in fields),
    ]
    for field in fields[: int(rng.integers(0, 3))]:
        lines += ["", f"    def get_{field}(self):", f"        return self.{field}"]
    return "\n".join(lines) + "\n"


def _function(rng: Rng) -> str:
    kind = rng.random()
    if kind < 0.2:
        name, body = _pick(rng, tuple(snippets.TWO.items()))
        names = _pick(rng, (("a", "b"), ("a", "b"), ("x", "y")))
        renamed = {"a": names[0], "b": names[1], "(a": "(" + names[0], "b)": names[1] + ")"}
        body = " ".join(renamed.get(word, word) for word in body.split())
        head = f"def {name}({names[0]}, {names[1]}):\n"
    elif kind < 0.4:
        name, body = _pick(rng, tuple(snippets.ONE.items()))
        x = _pick(rng, ("x", "n", "x", "value"))
        head, body = f"def {name}({x}):\n", body.format(x=x)
    elif kind < 0.65:
        name, (zero, step) = _pick(rng, tuple(snippets.FOLDS.items()))
        x, items = _pick(
            rng, (("x", "items"), ("n", "numbers"), ("v", "values"), ("item", "items"))
        )
        t = _pick(rng, ("total", "result", "out"))
        loop = f"    for {x} in {items}:\n        {step.format(t=t, x=x)}\n"
        return f"def {name}({items}):\n    {t} = {zero}\n{loop}    return {t}\n"
    elif kind < 0.9:
        return _pick(rng, snippets.WHOLE)
    else:
        return _class(rng)
    doc = (
        f'    """{snippets.DOCSTRINGS[name]}"""\n'
        if name in snippets.DOCSTRINGS and rng.random() < 0.3
        else ""
    )
    return f"{head}{doc}    return {body}\n"


def functions(rng: Rng) -> str:
    """A file of short Python functions and classes, no two of one name: a file that defines a
    function twice would teach a model to go round in circles.
    """
    found = {}
    for _ in range(int(rng.integers(6, 24))):
        text = _function(rng)
        found.setdefault(text.split("(")[0].split(":")[0], text)
    return "\n\n".join(found.values())


GENERATORS: dict[str, Callable[[Rng], str]] = {
    "count": counting,
    "cycle": cycle,
    "math": sums,
    "functions": functions,
}


def documents(kind: str, seed: int, size: int) -> list[str]:
    """Documents of `kind` (a key of GENERATORS), at least `size` characters together; the same for
    the same arguments.
    """
    rng = np.random.default_rng([seed, sorted(GENERATORS).index(kind)])
    out, length = [], 0
    while length < size:
        out.append(GENERATORS[kind](rng))
        length += len(out[-1])
    return out
