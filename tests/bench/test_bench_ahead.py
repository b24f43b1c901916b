"""python -m areno.bench ahead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areno.bench import ahead
from areno.bench.__main__ import main
from areno.engine.engine import Engine

TINY = (
    "ahead --shape tiny --device cpu --prompts 2 --samples 3 --prompt-len 8 --new-tokens 30 --mean-tokens 9 --ahead 2"
)


def run_of(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*TINY.split(), *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures of all steps, those of simulated ones too."""
    found, step = list[Any](), ahead._Mode.step

    def watched(self: Any, engine: Any) -> Any:
        each = step(self, engine)
        found.append((type(self), type(engine), self.choice, each))
        return each

    monkeypatch.setattr(ahead._Mode, "step", watched)
    return found


@pytest.mark.slow
def test_both_modes_are_timed_over_the_same_lengths(capsys: pytest.CaptureFixture[str], steps: list[Any]) -> None:
    found = run_of(capsys, "--repeats", "2")
    speeds = [found[name]["tokens_per_second"] for name in ("full_batch", "waits", "ahead")]
    assert min(speeds) > 0
    assert found["ratio"] == pytest.approx(speeds[2] / speeds[1], rel=1e-9)
    assert 0 < found["recomputed"] < 3
    assert found["age"] in (1, 2, 3, 4)
    assert 4 < found["mean_tokens"] < 14
    timed = [each for kind, engine, _, each in steps if engine is Engine and kind is ahead._Waits]
    assert [each.sampled for each in timed] == [each.trained for each in timed]
    assert found["waits"]["over_full"] == pytest.approx(
        sum(each.seconds for each in timed) * speeds[0] / sum(each.sampled for each in timed)
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--equal-rewards", "0.5")], ids=["all", "half"])
def test_each_token_is_sampled_once(capsys: pytest.CaptureFixture[str], steps: list[Any], more: Any) -> None:
    """Over many steps of one run, the simulated ones and the others."""
    run_of(capsys, "--repeats", "2", "--at-once", "5", *more)
    kinds = {kind for kind, _, _, _ in steps}
    [kind] = kinds & {ahead._Ahead, ahead._Replaces}
    gone, n_sampled, last = [], 0, None
    for found, _, choice, each in steps:
        if found is kind:
            gone += choice.gone
            n_sampled += each.sampled
            last = choice
            assert len(choice.taken) == 2
    assert last is not None
    left = [group for group in last.groups if group not in last.gone]
    ended = sum(len(output.tokens) for group in gone for output in group.outputs)
    parts = sum(
        len((group.finished.get(k) or group.parked[k]).tokens)
        for group in left
        for k in range(3)
        if k in group.finished or k in group.parked
    )
    assert n_sampled == ended + parts
    assert len(gone) == len({(group.batch, group.place) for group in gone})
    lengths = {(group.batch, group.place): [len(output.tokens) for output in group.outputs] for group in gone}
    other = (kinds - {kind}).pop()
    waited = [choice for found, _, choice, _ in steps if found is other]
    common = 0
    for group in (group for choice in waited for group in choice.taken):
        if (known := lengths.get((group.batch, group.place))) is not None:
            assert known == [len(output.tokens) for output in group.outputs]
            common += 1
    assert common > 1


@pytest.mark.slow
def test_groups_with_equal_rewards_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_of(capsys, "--repeats", "3", "--equal-rewards", "0.5", "--max-head-offpolicyness", "2")
    assert found["ahead"]["dropped"] > 0
    assert found["waits"]["dropped"] > 0
    assert found["age"] <= 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--equal-rewards", "1"], "below 1"),
        (["--equal-rewards", "0.5", "--max-head-offpolicyness", "0"], "--equal-rewards"),
        (["--ahead", "9"], "--ahead"),
    ],
)
def test_arguments_that_do_not_fit(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), *more]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), "--repeats", "1", "--at-once", "3"]) == 0
    said = capsys.readouterr().out
    assert "steps that wait" in said
    assert "2 prompts ahead" in said
    assert "computed again" in said
