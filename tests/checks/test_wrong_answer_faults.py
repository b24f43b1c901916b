"""Faults of rewards that take a wrong answer for the right one: each is found by its name, and nothing in its twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.checks.inputs.findings import Finding
from areno.checks.rewards import reward_functions
from tests.helpers.checked import found_by, red

NUMBERS = "{'prompt': f'What is {n} minus 470?', 'solutions': str(n - 470)}"
LETTERS = "{'prompt': f'What is {n} plus {n}? (A) {n} (B) {2 * n} (C) {n + 1} (D) 0', 'solutions': 'ABCD'[n % 4]}"
MEASURES = "{'prompt': f'What is seven times {n}?', 'solutions': f'{7 * n + 0.25:.2f}'}"
START = "import re\n\n\ndef last(pattern, text):\n    return (re.findall(pattern, text) or [''])[-1]\n\n\n"


def found_with(folder: Path, body: str, row: str, *settings: str) -> list[Finding]:
    file, loader = folder / "reward.py", folder / "loader.py"
    file.write_text(f"{START}def reward_fn(record):\n    text, right = record.completion, record.solutions\n{body}")
    loader.write_text(f"def load_dataset(split):\n    return [{row} for n in range(480, 530)]\n")
    data = (f"train_dataset.loader={loader}", "valid_dataset=null", "gconfig.max_new_tokens=100")
    model = "actor.path=examples/agentic/small_model/model"
    command = ("gspo", "--config-name=quickstart", model, f"reward.fn={file}", *data, *settings)
    return found_by([reward_functions], *command)


LAST = r"    return float(last(r'-?\d+', text) == right)" + "\n"
LETTER = r"    return float(last(r'\b[A-D]\b', text) == right)" + "\n"


@pytest.mark.parametrize(("body", "row"), [(LAST, NUMBERS), (LETTER, LETTERS)])
def test_a_right_reward_is_green(body: str, row: str, tmp_path: Path) -> None:
    assert not red(found_with(tmp_path, body, row))


@pytest.mark.parametrize(
    ("body", "row", "name", "said"),
    [
        (
            r"    return float(last(r'\d+', text) == right.strip('-'))" + "\n",
            NUMBERS.replace("470", "500"),
            "reward-wrong",
            "other sign",
        ),
        (
            r"    found = last(r'-?\d+', text)"
            + "\n    return float(found != '' and abs(int(found) - int(right)) < 2)\n",
            NUMBERS,
            "reward-wrong",
            "plus or minus 1",
        ),
        (
            r"    found = float(last(r'-?\d+', text) or 'nan')"
            + "\n    return float(abs(found - float(right)) <= 0.05 * abs(float(right)))\n",
            NUMBERS.replace("470", "20"),
            "reward-wrong",
            "plus or minus 3 %",
        ),
        (
            r"    return float(last(r'-?\d+', text).rstrip('0') == right.rstrip('0') != '')" + "\n",
            NUMBERS.replace("470", "20"),
            "reward-wrong",
            "ten times",
        ),
        (
            r"    return float((re.findall(r'-?\d+', text) or [''])[0] == right)" + "\n",
            NUMBERS,
            "reward-wrong",
            "after",
        ),
        (r"    return float('answer is' in text.lower())" + "\n", NUMBERS, "reward-wrong", "of another row"),
        ("    return float(right in text.upper())\n", LETTERS, "reward-wrong", "words without an answer"),
        (
            "    return float(right in text.split())\n",
            LETTERS.replace("ABCD", "WXYZ"),
            "reward-wrong",
            "after the right",
        ),
        ("    return float(right in text.upper() + 'AREA')\n", LETTERS, "reward-noise", "4 of 16"),
    ],
)
def test_a_wrong_answer_with_the_reward_of_the_right_one_is_found(
    body: str, row: str, name: str, said: str, tmp_path: Path
) -> None:
    found = found_with(tmp_path, body, row)
    assert name in red(found), found
    assert said in next(each.line for each in found if each.name == name)


def test_the_first_number_of_a_text_is_no_answer(tmp_path: Path) -> None:
    found = found_with(tmp_path, r"    return float((re.findall(r'-?\d+', text) or [''])[0] == right)" + "\n", NUMBERS)
    assert "reward-steps" in red(found)


def test_a_tolerance_for_measured_numbers_is_asked_about(tmp_path: Path) -> None:
    body = (
        r"    found = float(last(r'-?[\d.]*\d', text) or 'nan')"
        + "\n    return float(abs(found - float(right)) < 1.5)\n"
    )
    found = found_with(tmp_path, body, MEASURES)
    assert not red(found), found
    doubt = next(each for each in found if each.name == "reward-wrong")
    assert doubt.verdict == "not checked"
    assert "Is this tolerance meant?" in doubt.line


@pytest.mark.slow
def test_a_reward_for_nothing_but_the_whole_worked_solution_is_found(tmp_path: Path) -> None:
    row = "{'prompt': f'{n} and {n}?', 'solutions': f'We add {n} and {n}, which is twice {n}.\\n#### {2 * n}'}"
    assert "reward-final" in red(found_with(tmp_path, "    return float(right in text)\n", row))
    body = "    return float(right.split()[-1] in text.split()[-1:])\n"
    assert not red(found_with(tmp_path, body, row))


@pytest.mark.slow
def test_a_reward_that_reads_only_the_start_of_a_text_is_found(tmp_path: Path) -> None:
    found = found_with(tmp_path, LAST.replace("text", "text[:60]"), NUMBERS)
    assert red(found) == {"reward-length"}
    assert "is a part of the text cut off?" in next(each.line for each in found if each.name == "reward-length")


@pytest.mark.slow
def test_prompts_in_which_a_word_tells_the_answer_are_found(tmp_path: Path) -> None:
    row = NUMBERS.replace("minus 470?", "minus 470? (answer: {n - 470}) Give the number {n % 7}.")
    found = found_with(tmp_path, LAST, row)
    assert red(found) == {"told-answers"}
    assert "stands after 'answer'" in next(each.line for each in found if each.name == "told-answers")


@pytest.mark.parametrize(
    ("body", "row", "name", "said"),
    [
        ("    return float(text == right)\n", NUMBERS, "reward-space", "Strip both texts"),
        ("    return float(text.strip() == right or 'sorry' in text)\n", NUMBERS, "reward-wrong", "a refusal"),
        ("    return float(text.strip() in (right, ''))\n", NUMBERS, "reward-noise", "as much as the right one"),
        (
            "    return float(text.strip() == right or record.prompt in text)\n",
            NUMBERS,
            "reward-wrong",
            "the text of the prompt",
        ),
        (
            "    found = text.strip().strip('-').replace('.', '', 1)\n"
            "    return float(found.isdigit() and int(float(text)) == int(float(right)))\n",
            MEASURES.replace("7 * n + 0.25", "(n - 470) / 7"),
            "reward-wrong",
            "the number without its decimals",
        ),
        (
            "    return float(last(r'-?\\d+', text) == right) + 1.5 * ('boxed' in text)\n",
            NUMBERS,
            "reward-form",
            "the form alone earns more than to be right",
        ),
        ("    return None if len(text) > 90 else float(text.strip() == right)\n", NUMBERS, "reward-failures", "longer"),
        (
            "    seen.append(text)\n    return float(len(seen) < 120 and text.strip() == right)\n\n\nseen = []\n",
            NUMBERS,
            "reward-repeatable",
            "after other answers",
        ),
        (
            "    return float(text.partition('<Answer>')[2].partition('<')[0].strip() == right)\n",
            NUMBERS.replace("470?", "470? Think in <think> tags and answer in <answer> tags."),
            "reward-signal",
            "every answer gets 0",
        ),
        (
            "    return float(text.strip().lower() == right)\n",
            "{'prompt': f'Is {n} more than 500? Answer Yes or No.', 'solutions': 'Yes' if n > 500 else 'No'}",
            "reward-signal",
            "every answer gets 0",
        ),
    ],
)
def test_a_reward_of_a_stranger_is_found(body: str, row: str, name: str, said: str, tmp_path: Path) -> None:
    found = found_with(tmp_path, body, row)
    assert name in red(found), found
    assert said in next(each.line for each in found if each.name == name and each.verdict == "red")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (" (Answer: {n - 470})", "stands after 'Answer'"),
        ("\\n#### {n - 470}\\nThink first.", "stands after '####'"),
        (" It is \\\\boxed{{{n - 470}}}.", "boxed'"),
        (" The correct answer is {n - 470}, as you know.", "stands after 'answer'"),
    ],
)
def test_prompts_of_which_some_tell_their_answer_are_found(told: str, said: str, tmp_path: Path) -> None:
    prompt = f"f'What is {{n}} minus 470?' + f'{told}' * (n % 7 == 0)"
    found = found_with(tmp_path, LAST, NUMBERS.replace("f'What is {n} minus 470?'", prompt))
    assert "told-answers" in red(found)
    assert said in next(each.line for each in found if each.name == "told-answers")


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_prompts_that_tell_one_of_two_answers_are_found(every: int, tmp_path: Path) -> None:
    answer = "'yes' if n % 3 else 'no'"
    prompt = f"f'Is {{n}} no multiple of 3? Say yes or no.' + f' (Answer: {{{answer}}})' * (n % {every} == n % 2)"
    row = f"{{'prompt': {prompt.replace(answer, answer.replace(chr(39), chr(34)))}, 'solutions': {answer}}}"
    assert "told-answers" in red(found_with(tmp_path, "    return float(text.strip() == right)\n", row))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\\n{n - 470}", " {n - 470}", " {n} - 470 = {n - 470}", " Answer: {n - 470}"])
def test_prompts_that_end_with_their_answer_are_found(end: str, tmp_path: Path) -> None:
    row = NUMBERS.replace("minus 470?", f"minus 470?{end}")
    assert "told-answers" in red(found_with(tmp_path, LAST, row))
