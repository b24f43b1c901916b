"""Repair tasks: small correct modules, into each of which one mistake is put that its tests notice."""

import ast
import random
import textwrap

# Module name -> (code, tests as (expression, expected value)).
MODULES = {
    "intervals": (
        '''
        """Closed intervals of integers."""


        def overlaps(a, b):
            """Whether two intervals (first, last) share a number."""
            return a[0] <= b[1] and b[0] <= a[1]


        def merge(intervals):
            """The union of intervals, sorted, without overlaps."""
            merged = []
            for first, last in sorted(intervals):
                if merged and first <= merged[-1][1] + 1:
                    merged[-1] = (merged[-1][0], max(merged[-1][1], last))
                else:
                    merged.append((first, last))
            return merged


        def length(intervals):
            """How many numbers are in the union."""
            return sum(last - first + 1 for first, last in merge(intervals))
        ''',
        [
            ("overlaps((1, 3), (3, 5))", True),
            ("overlaps((1, 2), (3, 5))", False),
            ("overlaps((4, 9), (1, 4))", True),
            ("merge([(5, 7), (1, 2), (2, 3)])", [(1, 3), (5, 7)]),
            ("merge([(1, 9), (2, 3)])", [(1, 9)]),
            ("merge([(1, 2), (3, 4), (6, 6)])", [(1, 4), (6, 6)]),
            ("length([(1, 3), (2, 5), (9, 9)])", 6),
            ("length([])", 0),
        ],
    ),
    "roman": (
        '''
        """Roman numerals."""

        SYMBOLS = [("M", 1000), ("CM", 900), ("D", 500), ("CD", 400), ("C", 100), ("XC", 90), ("L", 50), ("XL", 40)]
        SYMBOLS += [("X", 10), ("IX", 9), ("V", 5), ("IV", 4), ("I", 1)]


        def to_roman(number):
            """The numeral of a number from 1 to 3999."""
            if number < 1 or number > 3999:
                raise ValueError(f"{number} has no numeral")
            text = ""
            for symbol, value in SYMBOLS:
                while number >= value:
                    text += symbol
                    number -= value
            return text


        def from_roman(text):
            """The number of a numeral."""
            values = {symbol: value for symbol, value in SYMBOLS if len(symbol) == 1}
            total = 0
            for i in range(len(text)):
                value = values[text[i]]
                if i + 1 < len(text) and value < values[text[i + 1]]:
                    total -= value
                else:
                    total += value
            return total
        ''',
        [
            ("to_roman(1)", "I"),
            ("to_roman(4)", "IV"),
            ("to_roman(1994)", "MCMXCIV"),
            ("to_roman(3999)", "MMMCMXCIX"),
            ("from_roman('MCMXCIV')", 1994),
            ("from_roman('XL')", 40),
            ("from_roman('III')", 3),
            ("[from_roman(to_roman(n)) for n in range(1, 60)] == list(range(1, 60))", True),
            ("raises(lambda: to_roman(0))", True),
            ("raises(lambda: to_roman(4000))", True),
        ],
    ),
    "bank": (
        '''
        """Accounts with a limit below which they cannot go."""


        class Account:
            def __init__(self, balance=0, limit=0):
                self.balance = balance
                self.limit = limit
                self.history = []

            def deposit(self, amount):
                if amount <= 0:
                    raise ValueError("deposit something")
                self.balance += amount
                self.history.append(amount)

            def withdraw(self, amount):
                if amount <= 0 or self.balance - amount < -self.limit:
                    raise ValueError("cannot withdraw this")
                self.balance -= amount
                self.history.append(-amount)


        def transfer(source, target, amount):
            """Move money; nothing moves if it cannot be withdrawn."""
            source.withdraw(amount)
            target.deposit(amount)


        def after(balance, limit, *amounts):
            """(balance, history) after deposits, and withdrawals as negative amounts."""
            account = Account(balance, limit)
            for amount in amounts:
                if amount >= 0:
                    account.deposit(amount)
                else:
                    account.withdraw(-amount)
            return account.balance, account.history
        ''',
        [
            ("after(0, 0, 10, -4)", (6, [10, -4])),
            ("after(0, 5, -5)", (-5, [-5])),
            ("raises(lambda: after(0, 5, -6))", True),
            ("raises(lambda: after(1, 0, 0))", True),
            ("raises(lambda: Account(5).withdraw(0))", True),
            ("raises(lambda: Account(5).withdraw(-1))", True),
            ("after(3, 0, -3)", (0, [-3])),
            ("raises(lambda: transfer(Account(1), Account(), 2))", True),
            ("(lambda a, b: (transfer(a, b, 2), a.balance, b.balance))(Account(5), Account(1))[1:]", (3, 3)),
        ],
    ),
    "texts": (
        '''
        """Words and lines."""


        def wrap(text, width):
            """Lines of at most `width` characters, broken at spaces; a longer word has a line of its own."""
            lines = []
            for word in text.split():
                if lines and len(lines[-1]) + 1 + len(word) <= width:
                    lines[-1] += " " + word
                else:
                    lines.append(word)
            return lines


        def most_common(text, count):
            """The most common words, in small letters; of equally common ones the first in the alphabet."""
            numbers = {}
            for word in text.lower().split():
                numbers[word] = numbers.get(word, 0) + 1
            ranked = sorted(numbers, key=lambda word: (-numbers[word], word))
            return ranked[:count]


        def is_palindrome(text):
            """Whether the letters read the same both ways."""
            letters = [char for char in text.lower() if char.isalpha()]
            return letters == letters[::-1]
        ''',
        [
            ("wrap('a bb ccc', 4)", ["a bb", "ccc"]),
            ("wrap('a bb ccc', 3)", ["a", "bb", "ccc"]),
            ("wrap('incredible it is', 5)", ["incredible", "it is"]),
            ("wrap('', 5)", []),
            ("most_common('b a B c a b', 2)", ["b", "a"]),
            ("most_common('y x', 1)", ["x"]),
            ("most_common('y x', 0)", []),
            ("is_palindrome('Never odd or even!')", True),
            ("is_palindrome('ab')", False),
        ],
    ),
}
_SWAPS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def mutants(code):
    """All texts of the code with one operator or number changed. No +=, which could make a loop endless."""
    n_nodes = sum(1 for _ in ast.walk(ast.parse(code)))
    found = []
    for number in range(n_nodes):
        tree = ast.parse(code)
        node = next(node for i, node in enumerate(ast.walk(tree)) if i == number)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
            node.ops[0] = _SWAPS[type(node.ops[0])]()
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPS:
            node.op = _SWAPS[type(node.op)]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        else:
            continue
        found.append(ast.unparse(tree) + "\n")
    return found


def fails(code, tests):
    """The tests that this code does not pass. Only code of this module is run, which ends."""
    failed = []
    for expression, expected in tests:
        names = {"raises": raises}
        try:
            exec(code, names)
            if eval(expression, names) != expected:
                failed.append((expression, expected))
        except Exception:
            failed.append((expression, expected))
    return failed


def raises(function):
    try:
        function()
    except ValueError:
        return True
    return False


def test_file(module, tests):
    """A file of unittest with these tests."""
    header = f"import unittest\n\nfrom {module} import *\n\n\ndef raises(function):\n    try:\n        function()\n"
    header += "    except ValueError:\n        return True\n    return False\n\n\nclass Tests(unittest.TestCase):\n"
    cases = [
        f"    def test_{number}(self):\n        self.assertEqual({expression}, {expected!r})\n"
        for number, (expression, expected) in enumerate(tests)
    ]
    return header + "\n".join(cases) + "\n\nif __name__ == '__main__':\n    unittest.main()\n"


def repairs(count, seed):
    """Rows of a dataset: files of a project with a mistake, hidden tests, and a prompt."""
    draw, pool = random.Random(seed), []
    for module, (code, tests) in MODULES.items():
        code = textwrap.dedent(code).lstrip()
        assert not fails(code, tests)
        pool += [(module, mutant, tests, failed) for mutant in mutants(code) if (failed := fails(mutant, tests))]
    rows = []
    for _ in range(count):
        module, mutant, tests, failed = draw.choice(pool)
        expression, expected = draw.choice(failed)
        seen = draw.sample(tests, 3)
        rows.append(
            {
                "files": {f"{module}.py": mutant, "test_some.py": test_file(module, seen)},
                "hidden_tests": {"test_hidden.py": test_file(module, tests)},
                "prompt": (
                    f"The Python project in this folder has one mistake: {expression} should be {expected!r}. Find it, "
                    "repair it, run the tests with python -m unittest, and submit."
                ),
            }
        )
    return rows
