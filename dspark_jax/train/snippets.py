"""Short Python functions, the parts that synthetic.functions puts together."""

# two numbers: name -> expression
TWO = {
    "add": "a + b",
    "subtract": "a - b",
    "multiply": "a * b",
    "divide": "a / b",
    "power": "a ** b",
    "maximum": "a if a > b else b",
    "minimum": "a if a < b else b",
    "average": "(a + b) / 2",
    "remainder": "a % b",
    "is_equal": "a == b",
    "is_less": "a < b",
}
# one number {x}
ONE = {
    "square": "{x} * {x}",
    "double": "2 * {x}",
    "half": "{x} / 2",
    "negate": "-{x}",
    "is_even": "{x} % 2 == 0",
    "is_odd": "{x} % 2 == 1",
    "is_positive": "{x} > 0",
    "increment": "{x} + 1",
    "cube": "{x} * {x} * {x}",
    "is_zero": "{x} == 0",
}
# a loop over {x} into {t}: name -> (start, step)
FOLDS = {
    "total": ("0", "{t} += {x}"),
    "product": ("1", "{t} *= {x}"),
    "count": ("0", "{t} += 1"),
    "sum_of_squares": ("0", "{t} += {x} * {x}"),
    "join": ('""', "{t} += str({x})"),
    "reverse": ("[]", "{t} = [{x}] + {t}"),
    "copy": ("[]", "{t}.append({x})"),
    "sum_list": ("0", "{t} += {x}"),
    "count_positive": ("0", "if {x} > 0:\n            {t} += 1"),
    "evens": ("[]", "if {x} % 2 == 0:\n            {t}.append({x})"),
    "squares": ("[]", "{t}.append({x} * {x})"),
}
DOCSTRINGS = {
    "add": "Return the sum of a and b.",
    "subtract": "Return a minus b.",
    "multiply": "Return the product of a and b.",
    "square": "Return the square.",
    "is_even": "Return True if the number is even.",
    "maximum": "Return the larger of a and b.",
    "minimum": "Return the smaller of a and b.",
}
# whole functions
WHOLE = tuple(
    part + "\n"
    for part in """
def factorial(n):
    if n == 0:
        return 1
    return n * factorial(n - 1)


def factorial(n):
    result = 1
    for i in range(1, n + 1):
        result *= i
    return result


def fibonacci(n):
    a, b = 0, 1
    for i in range(n):
        a, b = b, a + b
    return a


def fib(n):
    if n < 2:
        return n
    return fib(n - 1) + fib(n - 2)


def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


def is_prime(n):
    if n < 2:
        return False
    for i in range(2, n):
        if n % i == 0:
            return False
    return True


def reverse(text):
    return text[::-1]


def first(items):
    return items[0]


def last(items):
    return items[-1]


def is_palindrome(text):
    return text == text[::-1]


def swap(a, b):
    return b, a


def length(items):
    return len(items)


def count_down(n):
    while n > 0:
        print(n)
        n -= 1


def hello():
    print("Hello, world!")


def greet(name):
    print("Hello, " + name)


def absolute(x):
    if x < 0:
        return -x
    return x


def clamp(x, low, high):
    if x < low:
        return low
    if x > high:
        return high
    return x


def find(items, value):
    for i, item in enumerate(items):
        if item == value:
            return i
    return -1


def contains(items, value):
    for item in items:
        if item == value:
            return True
    return False


def largest(items):
    best = items[0]
    for item in items:
        if item > best:
            best = item
    return best


def smallest(items):
    best = items[0]
    for item in items:
        if item < best:
            best = item
    return best


def read_lines(path):
    with open(path) as f:
        return f.readlines()


for i in range(10):
    print(i)
""".strip("\n").split("\n\n\n")
)
