"""The built-in math reward: the verdict of math-verify on real answers, its documented exceptions, errors and time."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from math_verify import parse, verify

from areno.config.reward import RewardConfig
from areno.reward_fns import math_reward
from areno.reward_fns.math_reward import final_answer, reward_fn
from areno.scoring.pool import RewardPool
from areno.types import RewardRecord

DATA = Path(__file__).parents[3] / "shared/data"
GSM8K = DATA / "gsm8k/test.jsonl"
MATH = DATA / "math/math500.jsonl"
POLITE = "\n\nI hope this helps! Let me know if you have 3 more questions."


def score(gold, completion: str) -> float:
    return reward_fn(RewardRecord(completion=completion, solutions=gold))


# The verdict of math-verify -------------------------------------------------------------------------------------------

# Solution -> answers, each on a line of its own, or separated by " ;; ". math-verify itself says which are equal.
CROSS_CHECK = {
    "42": r"""42 ;; \boxed{42} ;; The answer is 43. ;; So she has 42 eggs. ;; 42.0 ;; \boxed{42 \text{ eggs}}
        $42$ ;; -42
        **42** ;; \boxed{41}, no: wait. ;; forty-two ;; \boxed{6 \cdot 7} ;; 42% ;; \(42\) ;; \boxed{x = 42}
        = 42 ;; 4 2
        The final answer is $\boxed{42}$. I hope it is correct. ;; 042 ;; It is 42, not 43. ;; \boxed{12:00} ;; \boxed{}
        The answer is 42. Let me know if you have 3 more questions. ;; \boxed{42} Can I help with 2 other things?""",
    "-5": r"""-5 ;; \boxed{-5} ;; The answer is -5. ;; 5 ;; $-5$ ;; \boxed{-5.0} ;; \boxed{5} ;; (-5)
        \boxed{-\frac{10}{2}}""",
    "0": r"0 ;; \boxed{0} ;; -0 ;; \boxed{0.0} ;; 1 ;; none",
    "0.5": r"""0.5 ;; 1/2 ;; \boxed{\frac{1}{2}} ;; .5 ;; 50% ;; $\frac12$ ;; 0.51 ;; \boxed{0.5000000}
        \boxed{2^{-1}} ;; 0,5""",
    "3.14": r"3.14 ;; \boxed{\pi} ;; 3.1400 ;; The answer is 3.14 ;; 22/7 ;; \boxed{3.15}",
    "0.333333": r"\boxed{\frac13} ;; 1/3 ;; 0.333 ;; 0.3333333",
    "2,125": r"""2125 ;; 2,125 ;; \boxed{2,125} ;; $2,125 ;; 2,126 ;; The answer is 2,125 dollars.
        \boxed{2{,}125} ;; 2 125""",
    "1,234.56": r"1234.56 ;; $1,234.56 ;; \boxed{1,234.56} ;; 1234.57 ;; 1234",
    "1 234": "1234 ;; 1,234 ;; 234",
    "1/2": r"0.5 ;; 1/2 ;; \boxed{\frac{1}{2}} ;; \boxed{\dfrac{2}{4}} ;; 2/1 ;; $\frac{1}{3}$ ;; \boxed{1/2} ;; 50%",
    "-3/4": r"-0.75 ;; -3/4 ;; \boxed{-\frac{3}{4}} ;; \boxed{\frac{-3}{4}} ;; 3/4",
    r"$\frac{14}{3}$": r"14/3 ;; \boxed{\frac{14}{3}} ;; \boxed{4\frac{2}{3}} ;; 4.666667 ;; 4.67 ;; $\dfrac{28}{6}$",
    "25%": r"25% ;; 25 percent ;; 25 ;; 0.25 ;; 1/4 ;; 26% ;; The answer is 25%. ;; 25 pct ;; $25$% ;; \boxed{25}",
    "28 percent": r"28% ;; $28\%$ ;; 28 percent ;; 0.28 ;; 29 percent ;; 28 ;; \boxed{28\text{ percent}}",
    "12.5%": "12.5% ;; 12.5 percent ;; 0.125 ;; 12.5 ;; 1/8 ;; 12% ;; $12.5$%",
    r"$28\%$": r"28 percent ;; 28% ;; $28\%$ ;; \boxed{28} ;; 29% ;; 28",
    "$12:30$": r"\boxed{12:30} ;; \boxed{12:45} ;; $12:30$ ;; \boxed{2/5}",
    "$12:00$": r"\boxed{12:00} ;; \boxed{13:00} ;; $12:00$ ;; \boxed{12}",
    "$1:0$": r"\boxed{1:0} ;; \boxed{0:1} ;; $1:0$",
    "$1/0$": r"\boxed{1/0} ;; $1/0$ ;; \boxed{1} ;; \boxed{2/0}",
    r"$\frac{1}{0}$": r"""\boxed{\frac{1}{0}} ;; \boxed{1/0} ;; $\frac{1}{0}$ ;; \boxed{\frac{2}{0}}
        \boxed{\infty} ;; 0""",
    "$3:4$": r"\boxed{3:4} ;; \boxed{6:8} ;; \boxed{\frac34} ;; $4:3$ ;; \boxed{0.75}",
    "$(1,2)$": r"""\boxed{(1,2)} ;; \boxed{1,2} ;; \boxed{(2,1)} ;; $(1, 2)$ ;; \boxed{[1,2]}
        \boxed{\left(1,2\right)}""",
    "$[0,1)$": r"\boxed{[0,1)} ;; \boxed{(0,1)} ;; $\left[0, 1\right)$ ;; \boxed{0 \le x < 1} ;; \boxed{x \in [0,1)}",
    r"$(-\infty,2)\cup(3,\infty)$": r"""\boxed{(-\infty, 2) \cup (3, \infty)} ;; \boxed{(3,\infty) \cup (-\infty,2)}
        \boxed{(-\infty,2)} ;; \boxed{x<2 \text{ or } x>3}""",
    r"$\{1,2,3\}$": r"""\boxed{\{1,2,3\}} ;; \boxed{\{3,2,1\}} ;; \boxed{1,2,3} ;; \boxed{\{1,2\}} ;; $1,2,3$
        $1$, $2$ and $3$
        \boxed{1, 2, \text{ and } 3}""",
    "$1,-2$": r"\boxed{1,-2} ;; \boxed{-2,1} ;; \boxed{-2} ;; $-2$ and $1$ ;; \boxed{x=1, x=-2}",
    r"$(3, \frac{\pi}{2})$": r"""\boxed{\left( 3, \frac{\pi}{2} \right)} ;; \boxed{(3, \pi)} ;; \boxed{(3, 90^\circ)}
        \boxed{(3.0, \pi/2)}""",
    "$(1,2,3)$": r"\boxed{(1,2,3)} ;; \boxed{(1,3,2)} ;; \boxed{1,2,3}",
    "$x=5$": r"""\boxed{x=5} ;; \boxed{5} ;; $x = 5$ ;; \boxed{y=5} ;; \boxed{x=6} ;; 5 ;; The answer is 5.
        \boxed{5=x}""",
    "$y=2x+3$": r"\boxed{y=2x+3} ;; \boxed{y = 3 + 2x} ;; \boxed{2x+3} ;; \boxed{y-2x=3} ;; \boxed{y=2x-3}",
    "$x>5$": r"\boxed{x>5} ;; \boxed{5<x} ;; \boxed{x\ge5} ;; \boxed{(5,\infty)}",
    "$x^2+1$": r"""\boxed{x^2+1} ;; \boxed{1+x^2} ;; \boxed{x^{2}+1} ;; \boxed{x^2-1} ;; \boxed{(x+i)(x-i)}
        \boxed{y^2+1}""",
    "$(x+1)^2$": r"\boxed{x^2+2x+1} ;; \boxed{(x+1)(x+1)} ;; \boxed{x^2+1}",
    r"$2\sqrt{3}$": r"""\boxed{2\sqrt{3}} ;; \boxed{\sqrt{12}} ;; \boxed{2\sqrt3} ;; 3.464102 ;; \boxed{2}
        $\sqrt{12}$""",
    r"$\frac{\sqrt{3}}{3}$": r"\boxed{\frac{1}{\sqrt{3}}} ;; \boxed{\frac{\sqrt3}{3}} ;; \boxed{\sqrt{3}}",
    r"$\pi$": r"\boxed{\pi} ;; \boxed{3.14} ;; \boxed{3.141593} ;; \boxed{2\pi} ;; $\pi$",
    "$6-5i$": r"\boxed{6-5i} ;; \boxed{-5i+6} ;; \boxed{6+5i}",
    r"$\text{Evelyn}$": r"\boxed{\text{Evelyn}} ;; \boxed{Evelyn} ;; \boxed{\text{Andre}} ;; So it is $\text{Evelyn}$.",
    r"$\text{(C)}$": r"\boxed{C} ;; \boxed{\text{(C)}} ;; \boxed{(C)} ;; \boxed{B} ;; \boxed{\text{C}}",
    r"$\text{even}$": r"\boxed{\text{even}} ;; \boxed{even} ;; \boxed{odd}",
    "5 cm": r"5 ;; \boxed{5 \text{ cm}} ;; 5 cm ;; 4 cm ;; \boxed{5\mbox{ cm}^2}",
    "42 eggs": r"42 eggs ;; \boxed{42} ;; 42 ;; \boxed{42 \text{ eggs}} ;; 43 eggs",
    "5 dollars": r"5 dollars ;; $5 ;; \boxed{5} ;; \boxed{\$5} ;; 6 dollars",
    "$1,250": r"$1,250 ;; 1250 ;; \boxed{\$1,250} ;; \boxed{1250} ;; $1250.00 ;; $1,251 ;; It costs $1,250 in total.",
    "$18.90": r"$18.90 ;; 18.9 ;; \boxed{18.90} ;; \boxed{\$18.90} ;; $18.09",
    "€5": "€5 ;; 5 ;; 5 euros",
    r"$90^\circ$": r"""\boxed{90^\circ} ;; \boxed{90} ;; 90 degrees ;; \boxed{90 \text{ degrees}}
        \boxed{\frac{\pi}{2}}""",
    r"$3 \times 10^5$": r"""\boxed{3 \times 10^5} ;; \boxed{300000} ;; 300,000 ;; $3\cdot 10^{5}$
        \boxed{3 \times 10^6} ;; 3*10^5""",
    r"$1.5 \times 10^{-3}$": r"\boxed{1.5 \times 10^{-3}} ;; 0.0015 ;; \boxed{0.0015} ;; \boxed{1.5 \times 10^{3}}",
    "10^5": r"100000 ;; \boxed{10^5} ;; 10^5 ;; $10^{5}$ ;; 10^6",
    "1000000": r"1,000,000 ;; \boxed{1{,}000{,}000} ;; \boxed{10^6} ;; 1 000 000 ;; 10^6 ;; \boxed{1\,000\,000}",
    r"$\begin{pmatrix} 1 \\ 2 \end{pmatrix}$": r"""\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}} ;; \boxed{(1,2)}
        \boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}} ;; \boxed{\begin{bmatrix} 1 \\ 2 \end{bmatrix}}""",
    r"$\infty$": r"\boxed{\infty} ;; \boxed{-\infty} ;; \boxed{infinity} ;; 0",
    r"$\pm 3$": r"\boxed{\pm 3} ;; \boxed{3} ;; \boxed{-3, 3} ;; \boxed{3, -3}",
    r"$\log 2$": r"\boxed{\log 2} ;; \boxed{\log(2)} ;; \boxed{\ln 2}",
    "The answer is 5.": r"5 ;; \boxed{5} ;; 6",
    r"So $x = \boxed{\frac12}$.": r"0.5 ;; \boxed{0.5} ;; \boxed{x = 1/2} ;; 2",
    "$4210_{5}$": r"\boxed{4210_5} ;; \boxed{4210} ;; \boxed{4210_{5}}",
}


@pytest.mark.slow
def test_verdict_is_that_of_math_verify():
    pairs = [
        (gold, answer.strip())
        for gold, answers in CROSS_CHECK.items()
        for answer in map(str.strip, answers.replace("\n", " ;; ").split(" ;; "))
    ]
    assert len(pairs) > 250
    golds = {gold: parse(gold) for gold in CROSS_CHECK}
    expected = {(gold, answer): float(verify(golds[gold], parse(answer))) for gold, answer in pairs}
    assert 100 < sum(expected.values()) < len(pairs) - 80
    assert {pair: score(*pair) for pair in pairs} == expected


# Where the answer is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{x = \boxed{3}}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{5} so I put it into \boxed{} and \boxed{6", "5"),
        (r"\boxed{\{1, 2\}} #### 3", r"\{1, 2\}"),
        ("#### 1\n#### 2", "2"),
        ("#### 42 eggs", "42"),
        ("####42", "42"),
        ("#### **42**", "42"),
        ("#### **42** eggs", "42"),
        ("#### $1,042.50.", "1,042.50"),
        (r"#### \$42", "42"),
        ("#### -42!", "-42"),
        ("#### 42" + POLITE, "42"),
        ("#### 42. I hope this helps with the 3 questions!", "42"),
        ("#### 42 - that is 6 times 7", "42"),
        ("#### 25% of the eggs", "25%"),
        ("#### 1/2", "1/2"),
        ("#### 2 + 3i", "2 + 3i"),
        (r"#### 2\sqrt{3}", r"2\sqrt{3}"),
        ("#### 3, 5, 7", "3, 5, 7"),
        ("#### 7\n#### Done", "7"),
        ("#### Done", None),
        ("#### 5\n#### Step 2: add 3", "5"),
        ("The answer is 42.", None),
        (r"\boxed{42", None),
        ("", None),
    ],
)
def test_final_answer(completion, answer):
    assert final_answer(completion) == answer


SEVERAL_BOXES = {
    r"Either $x=\boxed{1}$ or $x=\boxed{2}$.": (
        r"\boxed{2} or \boxed{1} ;; \boxed{x=2, x=1} ;; #### 1, 2 ;; \boxed{7}, so \boxed{1}, \boxed{2} ;; $\{1,2\}$",
        r"\boxed{2} ;; \boxed{1} and \boxed{1} ;; \boxed{1} and \boxed{3} ;; \boxed{1,2} ;; \boxed{(1, 2)} ;; #### 2,1",
    ),
    r"\boxed{1} and \boxed{234}": (r"\boxed{234}, \boxed{1} ;; \boxed{1, 234}", r"\boxed{1234} ;; \boxed{\$1,234}"),
    r"\boxed{red}, \boxed{blue}": (r"\boxed{Blue} and \boxed{red} ;; \boxed{red, blue}", r"\boxed{blue}"),
    r"\boxed{(1,2)}, \boxed{(3,4)}": (r"\boxed{(3,4), (1,2)}", r"\boxed{(3,4)} ;; \boxed{(1,2), (3,5)}"),
    r"\boxed{5\%}, \boxed{9\%}": (r"\boxed{0.09}, \boxed{5 percent} ;; \boxed{9\%, \text{ and } 5\%}", r"\boxed{9\%}"),
    r"\boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}": (r"\boxed{15.975} ;; 15.975", r"\boxed{15}"),
}


@pytest.mark.parametrize("gold", SEVERAL_BOXES)
def test_all_boxes_of_a_solution_count(gold):
    for answers, expected in zip(SEVERAL_BOXES[gold], (1.0, 0.0), strict=True):
        each = dict.fromkeys(answers.split(" ;; "), expected)
        assert {answer: score(gold, answer) for answer in each} == each


@pytest.mark.parametrize(
    "completion",
    ["#### 42 eggs", "#### **42**", "#### 42" + POLITE, "The answer is 42.\n#### Done", "#### $42.00", "####\n42"],
)
def test_answers_after_hashes(completion):
    assert score("42", completion) == 1.0
    assert score("4", completion) == score("2", completion) == 0.0


def label_forms(gold: str, other: str) -> dict[str, float]:
    right = [
        f"#### {gold} eggs",
        f"#### **{gold}**",
        f"#### ${gold}{POLITE}",
        f"The answer is {gold} dollars.\n#### Done",
        f"**Answer:** {gold}",
        rf"\boxed{{\${gold}}}. Are there 2 more?",
    ]
    wrong = [rf"\boxed{{{other}}}", f"#### {other} of {gold}", f"The answer is {other}."]
    return dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not there")
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_gsm8k_labels_in_the_words_of_chat_models(every):
    golds = [json.loads(line)["answer"].split("####")[1].strip() for line in GSM8K.open(encoding="utf-8")]
    assert len(golds) == 1319
    wrong = []
    for gold in golds[::every]:
        forms = label_forms(gold, str(int(gold.replace(",", "")) + 1))
        wrong += [(gold, form) for form, expected in forms.items() if score(gold, form) != expected]
    assert wrong == []


@pytest.mark.skipif(not MATH.is_file(), reason=f"{MATH} is not there")
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_math500_solutions(every):
    """The solutions are LaTeX without dollar signs, which math-verify alone reads in part: 3\\sqrt{13} as 3."""
    rows = [json.loads(line) for line in MATH.open(encoding="utf-8")]
    wrong = []
    for row, other in list(zip(rows, rows[1:] + rows[:1], strict=True))[::every]:
        gold, different = row["answer"], other["answer"]
        forms = {row["solution"]: 1.0, f"#### {gold}": 1.0}
        if not verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{different}}}")):
            forms[rf"\boxed{{{different}}}"] = 0.0
        wrong += [(gold, form) for form, expected in forms.items() if score(gold, form) != expected]
    assert len(rows) == 500
    assert wrong == []


# Exceptions from the verdict of math-verify ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        # What is written in the same way is equal, even if it has no value.
        ("12:00", [r"\boxed{12:00}", "#### 12:00", "It leaves at 12:00.", "The answer is 12:00, ok?"], ["12", "13:00"]),
        ("1:0", [r"\boxed{1:0}"], [r"\boxed{2:0}", r"\boxed{0}"]),
        ("1/0", [r"\boxed{1/0}", r"\boxed{\frac{1}{0}}"], [r"\boxed{2/0}", "1"]),
        (r"\frac{1}{0}", [r"\boxed{\frac{1}{0}}", r"\boxed{1/0}"], [r"\boxed{\infty}"]),
        ("42 eggs", [r"\boxed{42 eggs}", "42"], [r"\boxed{43 eggs}"]),
        ("x+1", ["The answer is x+1."], ["The answer is x+2."]),
        # Percentages
        ("25%", [r"\boxed{25\%}", r"\boxed{25 percent}", r"\boxed{25%}", "#### 25%"], [r"\boxed{26\%}", "#### 26%"]),
        ("12.5%", [r"\boxed{12.5\%}", r"\boxed{0.125}", r"So $12.5\%$", "#### 12.5 percent"], [r"\boxed{12\%}"]),
        (r"$12.5\%$", ["12.5%", "0.125", "12.5", r"\boxed{12.5 \%}"], ["125"]),
        (r"33\frac{1}{3}\%", [r"\boxed{33\frac13\%}", r"\boxed{\frac13}"], [r"\boxed{33\%}"]),
        # A solution without dollar signs is read to its end.
        (r"2\sqrt{3}", [r"\boxed{\sqrt{12}}", r"#### 2\sqrt{3}", r"$2\sqrt3$"], ["2", r"\boxed{2}"]),
        ("4xyz", [r"\boxed{4zyx}"], ["4"]),
        ("12:30", [r"\boxed{12:30}"], ["12", r"\boxed{12:45}"]),
        ("1,2", [r"\boxed{2,1}", r"\boxed{\{1,2\}}"], ["1.2"]),
        ("x = 5", [r"\boxed{5}", r"\boxed{x=5}", "5"], [r"\boxed{y=5}"]),
        # Scientific notation, also of numbers that are no text
        ("1.5e3", ["1500", "It is 1.5e3.", r"\boxed{1.5 \times 10^3}", "1.5E+03"], ["1.5", "1.5e4"]),
        ("0.00001", ["1e-5", r"\boxed{1e-05}"], ["1"]),
        (1e-05, ["0.00001", r"\boxed{10^{-5}}"], ["1"]),
        (1e16, ["10000000000000000", r"\boxed{10^{16}}"], ["1"]),
        (42, ["42"], ["43"]),
        (Decimal("0.1"), [r"\boxed{\frac{1}{10}}"], ["1"]),
        (Fraction(1, 3), [r"\boxed{\frac13}"], ["3"]),
        # Digits and minus signs of other scripts
        ("\u22125", ["-5", "The answer is \u22125.", "\\boxed{\u22125}", "#### \u22125"], ["5"]),
        ("42", ["答案是 \uff14\uff12", "٤٢"], ["\uff14\uff13"]),
        # Words are compared as text.
        (
            "forty two",
            [r"\boxed{forty two}", r"\boxed{\text{Forty two.}}", "#### forty two", "**Answer:** forty two"],
            [r"\boxed{two forty}", r"\boxed{rotfy two}", "42", "It is not forty two", "The answer is forty", ""],
        ),
        ("cat", [r"\boxed{Cat}", "#### cat"], [r"\boxed{act}", "#### act", "act"]),
        ("xyz", [r"\boxed{xyz}", r"\boxed{x y z}", r"\boxed{z*y*x}"], [r"\boxed{xy}"]),
        ("yes", ["#### Step 1\nThe answer is yes.", "Yes."], ["#### Step 1\nThe answer is no.", r"\boxed{sey}"]),
        ("no solution", [r"\boxed{\text{no solution}}", r"$\boxed{\text{No solution}}$"], [r"\boxed{0}", "solution"]),
        (r"\text{Evelyn}", [r"\boxed{Evelyn}", r"\boxed{\text{evelyn}}"], [r"\boxed{nylevE}", "Andre"]),
        ("Because it is odd.\n#### no", [r"\boxed{no}", "#### No"], [r"\boxed{yes}"]),
        ("infinity", [r"\boxed{\infty}", "infinity"], ["0"]),
        ("偶数", [r"\boxed{偶数}", "#### 偶数"], [r"\boxed{奇数}", "数偶"]),
    ],
)
def test_documented_exceptions_and_words(gold, right, wrong):
    assert {answer: score(gold, answer) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: score(gold, answer) for answer in wrong} == dict.fromkeys(wrong, 0.0)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solutions", [None, [], "", " ", "$", ["1", ""], [None], {"a": 1}, float("nan"), "1 + " * 400])
def test_unusable_solution(solutions):
    with pytest.raises(ValueError, match=r"field solutions is .*needs a number or formula"):
        score(solutions, r"\boxed{1}")


@pytest.mark.parametrize("name", ["parse", "verify"])
def test_an_error_of_math_verify_is_no_reward(name, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("sympy is confused")

    monkeypatch.setattr(math_reward, name, broken)
    math_reward.read_solution.cache_clear()
    with pytest.raises(RuntimeError, match="sympy is confused"):
        score("42", r"\boxed{6 \cdot 7}")


def test_an_error_does_not_hide_an_equal_solution(monkeypatch):
    def picky(gold, value, **options):
        if gold == 6:
            raise RuntimeError("no sixes")
        return verify(gold, value, **options)

    monkeypatch.setattr(math_reward, "verify", picky)
    assert score(["6", "7"], r"\boxed{7}") == 1.0
    with pytest.raises(RuntimeError, match="no sixes"):
        score(["6", "7"], r"\boxed{8}")


# Time -----------------------------------------------------------------------------------------------------------------

LONG = {
    "digits in a box": rf"\boxed{{{'1' * 10_000}}}",
    "digits": "the answer is " + "1" * 10_000,
    "letters in a box": rf"\boxed{{{'x' * 10_000}}}",
    "text": "blah 12 " * 12_500,
    "formulas": "so $x_1 = 3$ and " * 6_000,
    "dollar signs": "$ " * 5_001,
    "open brackets": r"\(" * 5_000,
    "braces": rf"\boxed{{{'{' * 500}1{'}' * 500}}}",
    "many braces": rf"\boxed{{{'{' * 5_000}1{'}' * 5_000}}}",
    "open boxes": r"\boxed{" * 15_000,
    "boxes": r"\boxed{1} " * 10_000,
    "hashes": "#" * 100_000,
    "hash lines": "#### x is\n" * 10_000,
    "list": rf"\boxed{{{','.join(map(str, range(1000)))}}}",
    "sum": "1+" * 5_000 + "1",
    "numbers": "1 " * 5_000,
    "answers": "answer " * 15_000,
    "words": "abc " * 25_000,
    "spaces": "#### 41" + " " * 100_000 + "x",
    "backslashes": "\\" * 10_000,
}
HARD = {
    "fractions": r"\boxed{" + r"\frac{" * 90 + "1" + "}{2}" * 90 + "}",
    "few fractions": r"\boxed{" + r"\frac{" * 30 + "1" + "}{2}" * 30 + "}",
    "open fractions": r"\boxed{" + r"\frac{" * 100,
    "roots": r"\boxed{" + r"\sqrt{" * 50 + "2" + "}" * 51,
    "parentheses": rf"\boxed{{{'(' * 100}1{')' * 100}}}",
    "power": "the answer is 9**9**9",
    "powers in a box": r"\boxed{9^{9^{9^9}}}",
    "power of two": r"\boxed{2^{100000000}}",
    "factorial": r"\boxed{99999999!}",
    "binomial": r"\boxed{\binom{1000000}{500000}}",
    "series": r"\boxed{\sum_{n=1}^{10000000} \frac{1}{n}}",
    "integral": r"\boxed{\int_0^1 e^{-x^2} \sin(x^x) dx}",
    "polynomial": r"\boxed{(x+y+z+w)^{40}}",
    "sum of variables": r"\boxed{" + "+".join(f"x_{{{i}}}" for i in range(100)) + "}",
    "tuple": rf"\boxed{{({','.join(map(str, range(200)))})}}",
    "trigonometry": r"\boxed{\sin(\cos(\tan(\sin(\cos(\tan(x^2+1))))))}",
}


def seconds(gold: str, completion: str) -> float:
    """Of computing: on a busy machine a clock on the wall measures the others."""
    start = time.thread_time()
    with contextlib.suppress(TimeoutError):
        assert score(gold, completion) == 0.0
    return time.thread_time() - start


@pytest.mark.slow
def test_long_answers_are_quick():
    taken = {name: seconds("42", answer) for name, answer in LONG.items()}
    assert max(taken.values()) < 2.0, taken  # below 1 on a machine that does nothing else


@pytest.mark.slow
@pytest.mark.parametrize("gold", ["42", r"2\sqrt{3}+x", "12:00", "25%", "forty two"])
def test_no_answer_takes_a_second_more_than_the_limit(gold, monkeypatch):
    monkeypatch.setattr(math_reward, "_LIMIT_S", 0.05)  # most of these answers meet it
    taken = {name: seconds(gold, answer) for name, answer in HARD.items()}
    assert max(taken.values()) < 1.3, taken  # below 0.3 on a machine that does nothing else


@pytest.mark.slow
def test_time_limit_leaves_nothing_behind():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match="math-verify took more than"):
        score("42", HARD["power"])
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGALRM) is before  # math-verify's own, with which pytest ends a hanging test
    assert score("42", "42") == 1.0


def test_a_thread_can_score(caplog):
    got = []
    thread = threading.Thread(target=lambda: got.append(score("1/2", r"\boxed{0.5}")))
    thread.start()
    thread.join()
    assert got == [1.0]
    assert not caplog.records


@pytest.mark.slow
def test_outcomes_in_the_reward_process():
    answers = [r"\boxed{42}", HARD["power"], r"\boxed{43}", "#### 42 eggs"]
    with RewardPool(RewardConfig(fn="math", workers=1, timeout_s=60.0)) as pool:
        pool.wait_ready()
        outcomes = pool.score([RewardRecord(completion=answer, solutions="42") for answer in answers])
    assert [outcome.status for outcome in outcomes] == ["ok", "timeout", "ok", "ok"]
    assert [outcome.value for outcome in outcomes] == [1.0, None, 0.0, 1.0]
    assert "math-verify took more than" in outcomes[1].message  # the process itself gave up, and went on


@pytest.mark.slow
def test_a_reward_process_has_scored_answers_of_some_kinds_before_the_first(tmp_path):
    """Their first time would be the longest of a step, in each process at another one."""
    probe = tmp_path / "probe.py"
    reads = "import sys\n\ndef seen(record):\n    read = sys.modules['areno.reward_fns.math_reward'].read_solution\n"
    probe.write_text(reads + "    return read.cache_info().currsize\n")
    config = RewardConfig(fn=["math", f"{probe}:seen"], weights=[0.0, 1.0], workers=1, timeout_s=60.0)
    with RewardPool(config) as pool:
        pool.wait_ready()
        [outcome] = pool.score([RewardRecord(completion="4", solutions="42")])
    math_reward.read_solution.cache_clear()
    math_reward.warm_up()
    assert outcome.value == math_reward.read_solution.cache_info().currsize + 1 > 2


def test_warming_up_raises_nothing(monkeypatch):
    monkeypatch.setattr(math_reward, "verify", lambda *_, **__: 1 / 0)
    math_reward.read_solution.cache_clear()
    math_reward.warm_up()
