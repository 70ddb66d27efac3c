"""Generated training text: counting, cycles, sums, and short Python functions. Seeded, unlimited, ours.

Every generator takes a `numpy.random.Generator` and returns one document (str). Lengths are random and long enough that an end is
never the likeliest next token, so a greedy continuation goes on.
"""
from collections.abc import Callable

import numpy as np

Rng = np.random.Generator

THEMES = (
    "red green blue yellow black white orange purple pink brown grey silver gold",
    "monday tuesday wednesday thursday friday saturday sunday",
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "January February March April May June July August September October November December",
    "one two three four five six seven eight nine ten",
    "cat dog bird fish horse cow sheep mouse lion bear wolf fox",
    "apple pear plum cherry lemon grape peach melon",
    "north east south west", "spring summer autumn winter", "up down left right", "tick tock", "yes no", "on off", "ping pong",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    "do re mi fa sol la ti", "alpha beta gamma delta", "sun moon star sky", "bread milk butter cheese salt sugar tea",
)
NOUNS = ("house garden river letter mother father sister brother friend door window table road hill tree book song day night "
         "morning evening room paper story city king queen child stone water fire hand heart word ship sea light").split()
VERBS = "saw found heard followed remembered opened carried left watched loved wanted made took gave kept passed".split()
ADJECTIVES = "old little great quiet happy dark bright long cold kind young white small fine poor good warm strange".split()


def _pick(rng: Rng, items):
    return items[int(rng.integers(len(items)))]


def counting(rng: Rng) -> str:
    """Numbers that rise (seldom fall) by a fixed step: mostly by 1, from 1 or from anywhere below 1,000."""
    step = int(rng.choice([1, 1, 1, 1, 1, 1, 1, 2, 5, 10, 3, -1]))
    start = _pick(rng, (1, 0, int(rng.integers(1, 30)), int(rng.integers(1, 120)), int(rng.integers(1, 1000)), int(rng.integers(1, 1000))))
    if step < 0:
        start = int(rng.integers(40, 300))
    elif step > 1 and rng.random() < 0.6:
        start = step * int(rng.integers(0, 20))
    end = max(start + step * int(rng.integers(30, 110)), -1)
    separator = str(rng.choice([" ", " ", " ", ", ", "\n"]))
    return separator.join(str(n) for n in range(start, end, step))


def _sentence(rng: Rng) -> str:
    forms = (lambda: f"the {_pick(rng, ADJECTIVES)} {_pick(rng, NOUNS)} {_pick(rng, VERBS)} the {_pick(rng, NOUNS)}",
             lambda: f"my {_pick(rng, NOUNS)} {_pick(rng, VERBS)} a {_pick(rng, ADJECTIVES)} {_pick(rng, NOUNS)}",
             lambda: f"a {_pick(rng, NOUNS)} and a {_pick(rng, NOUNS)} {_pick(rng, VERBS)} the {_pick(rng, ADJECTIVES)} {_pick(rng, NOUNS)}")
    text = _pick(rng, forms)()
    return text[0].upper() + text[1:] + "." if rng.random() < 0.7 else text


def cycle(rng: Rng) -> str:
    """A few words, a run of letters or a sentence, again and again."""
    kind = rng.random()
    if kind < 0.2:
        unit, separator = [_sentence(rng)], str(rng.choice([" ", "\n", "\n\n"]))
    else:
        size = int(rng.choice([2, 3, 3, 3, 4, 4, 5, 6, 7]))
        if kind < 0.7:
            words = _pick(rng, THEMES).split()
            at = int(rng.integers(len(words)))
            words = words[at:] + words[:at] if rng.random() < 0.5 else list(rng.permutation(words))
        elif kind < 0.9:
            words = list(rng.choice(NOUNS + VERBS + ADJECTIVES, size, replace=False))
        else:
            words = [str(n) for n in rng.integers(0, 100, size)]
        unit, separator = words[:size], str(rng.choice([" ", " ", " ", ", ", "\n", " - "]))
    length = len(separator.join(unit)) + len(separator)
    return separator.join(unit * max(3, int(rng.integers(250, 700)) // length))


def sums(rng: Rng) -> str:
    """Lines of small sums with their answers, one style a document; times tables; doublings; squares."""
    style, lines = rng.random(), []
    if style < 0.2:
        n, sign = int(rng.integers(2, 13)), _pick(rng, ("x", "*"))
        return "\n".join(f"{n} {sign} {i} = {n * i}" for i in range(1, int(rng.integers(12, 30))))
    if style < 0.3:
        n = int(rng.integers(1, 100))
        return "\n".join(f"{n} + {i} = {n + i}" for i in range(int(rng.integers(0, 3)), int(rng.integers(15, 30))))
    if style < 0.35:
        return "\n".join(f"{i} squared is {i * i}" for i in range(int(rng.integers(1, 5)), 30))
    if style < 0.45:
        return "\n\n".join(_word_problem(rng) for _ in range(6))
    top = int(rng.choice([10, 20, 100]))
    op = _pick(rng, ("+", "+", "-", "mixed"))
    form = _pick(rng, ("{a} {o} {b} = {c}", "{a} {o} {b} = {c}", "{a}{o}{b}={c}", "What is {a} {o} {b}? {c}.", "Q: {a} {o} {b}\nA: {c}"))
    for _ in range(int(rng.integers(15, 30))):
        a, b = (int(n) for n in rng.integers(0, top, 2))
        sign = _pick(rng, ("+", "-")) if op == "mixed" else op
        if sign == "-":
            a, b = max(a, b), min(a, b)
        lines.append(form.format(a=a, b=b, o=sign, c=a + b if sign == "+" else a - b))
    return "\n".join(lines)


def _word_problem(rng: Rng) -> str:
    name, thing = _pick(rng, ("Tom", "Anna", "Ben", "Emma", "Jane", "John")), _pick(rng, ("apples", "books", "stones", "letters", "pens"))
    a, b = (int(n) for n in rng.integers(2, 20, 2))
    if rng.random() < 0.5:
        return f"{name} has {a} {thing} and finds {b} more. Now {name} has {a} + {b} = {a + b} {thing}."
    a, b = max(a, b), min(a, b)
    return f"{name} has {a} {thing} and gives away {b}. Now {name} has {a} - {b} = {a - b} {thing}."


_TWO = {"add": "a + b", "subtract": "a - b", "multiply": "a * b", "divide": "a / b", "power": "a ** b", "maximum": "a if a > b else b",
        "minimum": "a if a < b else b", "average": "(a + b) / 2", "remainder": "a % b", "is_equal": "a == b", "is_less": "a < b"}
_ONE = {"square": "{x} * {x}", "double": "2 * {x}", "half": "{x} / 2", "negate": "-{x}", "is_even": "{x} % 2 == 0", "is_odd": "{x} % 2 == 1",
        "is_positive": "{x} > 0", "increment": "{x} + 1", "cube": "{x} * {x} * {x}", "is_zero": "{x} == 0"}
_FOLDS = {"total": ("0", "{t} += {x}"), "product": ("1", "{t} *= {x}"), "count": ("0", "{t} += 1"), "sum_of_squares": ("0", "{t} += {x} * {x}"),
          "join": ('""', "{t} += str({x})"), "reverse": ("[]", "{t} = [{x}] + {t}"), "copy": ("[]", "{t}.append({x})"),
          "sum_list": ("0", "{t} += {x}"), "count_positive": ("0", "if {x} > 0:\n            {t} += 1"),
          "evens": ("[]", "if {x} % 2 == 0:\n            {t}.append({x})"), "squares": ("[]", "{t}.append({x} * {x})")}
_WHOLE = (
    "def factorial(n):\n    if n == 0:\n        return 1\n    return n * factorial(n - 1)\n",
    "def factorial(n):\n    result = 1\n    for i in range(1, n + 1):\n        result *= i\n    return result\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    for i in range(n):\n        a, b = b, a + b\n    return a\n",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    "def is_prime(n):\n    if n < 2:\n        return False\n    for i in range(2, n):\n        if n % i == 0:\n            return False\n"
    "    return True\n",
    "def reverse(text):\n    return text[::-1]\n", "def first(items):\n    return items[0]\n", "def last(items):\n    return items[-1]\n",
    "def is_palindrome(text):\n    return text == text[::-1]\n", "def swap(a, b):\n    return b, a\n", "def length(items):\n    return len(items)\n",
    "def count_down(n):\n    while n > 0:\n        print(n)\n        n -= 1\n", "def hello():\n    print(\"Hello, world!\")\n",
    "def greet(name):\n    print(\"Hello, \" + name)\n", "def absolute(x):\n    if x < 0:\n        return -x\n    return x\n",
    "def clamp(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n        return high\n    return x\n",
    "def find(items, value):\n    for i, item in enumerate(items):\n        if item == value:\n            return i\n    return -1\n",
    "def contains(items, value):\n    for item in items:\n        if item == value:\n            return True\n    return False\n",
    "def largest(items):\n    best = items[0]\n    for item in items:\n        if item > best:\n            best = item\n    return best\n",
    "def smallest(items):\n    best = items[0]\n    for item in items:\n        if item < best:\n            best = item\n    return best\n",
    "def read_lines(path):\n    with open(path) as f:\n        return f.readlines()\n",
    "for i in range(10):\n    print(i)\n",
)
_DOCS = {"add": "Return the sum of a and b.", "subtract": "Return a minus b.", "multiply": "Return the product of a and b.",
         "square": "Return the square.", "is_even": "Return True if the number is even.", "maximum": "Return the larger of a and b.", "minimum": "Return the smaller of a and b."}


def _class(rng: Rng) -> str:
    name = _pick(rng, ("Point", "Person", "Counter", "Node", "Account", "Item", "Box", "User"))
    fields = list(rng.choice(["x", "y", "name", "value", "size", "count", "left", "right", "owner", "items"], int(rng.integers(1, 4)), replace=False))
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):", *(f"        self.{f} = {f}" for f in fields)]
    for field in fields[:int(rng.integers(0, 3))]:
        lines += ["", f"    def get_{field}(self):", f"        return self.{field}"]
    return "\n".join(lines) + "\n"


def _function(rng: Rng) -> str:
    kind = rng.random()
    if kind < 0.2:
        name, body = _pick(rng, tuple(_TWO.items()))
        names = _pick(rng, (("a", "b"), ("a", "b"), ("x", "y")))
        body = " ".join({"a": names[0], "b": names[1], "(a": "(" + names[0], "b)": names[1] + ")"}.get(w, w) for w in body.split())
        head = f"def {name}({names[0]}, {names[1]}):\n"
    elif kind < 0.4:
        name, body = _pick(rng, tuple(_ONE.items()))
        x = _pick(rng, ("x", "n", "x", "value"))
        head, body = f"def {name}({x}):\n", body.format(x=x)
    elif kind < 0.65:
        name, (zero, step) = _pick(rng, tuple(_FOLDS.items()))
        x, items, t = _pick(rng, (("x", "items"), ("n", "numbers"), ("v", "values"), ("item", "items"))) + (_pick(rng, ("total", "result", "out")),)
        return f"def {name}({items}):\n    {t} = {zero}\n    for {x} in {items}:\n        {step.format(t=t, x=x)}\n    return {t}\n"
    elif kind < 0.9:
        return _pick(rng, _WHOLE)
    else:
        return _class(rng)
    doc = f'    """{_DOCS[name]}"""\n' if name in _DOCS and rng.random() < 0.3 else ""
    return f"{head}{doc}    return {body}\n"


def functions(rng: Rng) -> str:
    """A file of short Python functions and classes."""
    return "\n\n".join(_function(rng) for _ in range(int(rng.integers(5, 12))))


GENERATORS: dict[str, Callable[[Rng], str]] = {"count": counting, "cycle": cycle, "math": sums, "functions": functions}


def documents(kind: str, seed: int, size: int) -> list[str]:
    """Documents of `kind` (a key of GENERATORS), at least `size` characters together; the same for the same arguments."""
    rng = np.random.default_rng([seed, sorted(GENERATORS).index(kind)])
    out, length = [], 0
    while length < size:
        out.append(GENERATORS[kind](rng))
        length += len(out[-1])
    return out
