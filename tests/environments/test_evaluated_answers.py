"""Answers that a generator of reasoning-gym evaluates as Python."""

from __future__ import annotations

from areno.environments.reasoning_gym import could_run_code


def test_answers_that_are_evaluated_cannot_call_anything() -> None:
    for answer in (
        "__import__('os').system('touch F')",
        "[c for c in ().__class__.__base__.__subclasses__()]",
        "open('F', 'w')",
        "\uff45val('1')",
        "(print)('x')",
        "[print][0]('x')",
        "{0: print}[0] ('x')",
        "exec\\\n('x')",
        "(exec #\n('x'))",
        "f\"{open('F')}\"",
        "x.doit",
        "Symbol('x')",
    ):
        assert could_run_code(answer), answer
    right = [
        "3 * (4 + 5) / (2)",
        "sin (x)**2 + exp(2*x) + C",
        "[[1, 2], [3, 4]]",
        "['A', 'B']",
        "1.5*x + .5",
        "Q _\n_ Q",
    ]
    assert not any(map(could_run_code, right))
