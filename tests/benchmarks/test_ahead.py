"""python -m benchmarks ahead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import ahead
from benchmarks.__main__ import main

TINY = (
    "ahead --shape tiny --device cpu --prompts 2 --samples 3 --prompt-len 8 --new-tokens 30 --mean-tokens 9 --ahead 2"
)


def run_of(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*TINY.split(), *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures of all steps."""
    found, step = list[Any](), ahead._Rollouts.step

    def watched(self: Any) -> None:
        step(self)
        found.append((type(self), self.n_ahead, self.choice, self.steps[-1]))

    monkeypatch.setattr(ahead._Rollouts, "step", watched)
    return found


@pytest.mark.slow
def test_both_modes_are_timed_over_the_same_lengths(capsys: pytest.CaptureFixture[str], steps: list[Any]) -> None:
    found = run_of(capsys, "--repeats", "2")
    speeds = [found[name]["tok_s"] for name in ("waits", "ahead")]
    assert min(speeds) > 0
    assert found["ratio"] == pytest.approx(speeds[1] / speeds[0], rel=1e-9)
    assert found["waits"]["recomputed"] == 0 < found["ahead"]["recomputed"] < 3
    assert 4 < found["waits"]["mean_tokens"] < 14
    timed = [each for _, n_ahead, _, each in steps if not n_ahead]
    assert [each.sampled for each in timed] == [each.trained for each in timed]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--equal-rewards", "0.5")], ids=["all", "half"])
def test_each_token_is_sampled_once(capsys: pytest.CaptureFixture[str], steps: list[Any], more: Any) -> None:
    """Over many steps of one run."""
    run_of(capsys, "--repeats", "2", "--at-once", "5", *more)
    gone, n_sampled, last = [], 0, None
    for _, n_ahead, choice, each in steps:
        if n_ahead:
            gone += choice.groups_no_longer_in_flight
            n_sampled += each.sampled
            last = choice
            assert len(choice.taken) == 2
    assert last is not None
    left = [group for group in last.groups if group not in last.groups_no_longer_in_flight]
    ended = sum(len(output.tokens) for group in gone for output in group.outputs)
    parts = sum(
        len((group.finished.get(k) or group.parked[k]).tokens)
        for group in left
        for k in range(3)
        if k in group.finished or k in group.parked
    )
    assert n_sampled == ended + parts
    assert len(gone) == len({(group.batch, group.prompt_index) for group in gone})
    lengths = {(group.batch, group.prompt_index): [len(output.tokens) for output in group.outputs] for group in gone}
    waited = [choice for _, n_ahead, choice, _ in steps if not n_ahead]
    common = 0
    for group in (group for choice in waited for group in choice.taken):
        if (known := lengths.get((group.batch, group.prompt_index))) is not None:
            assert known == [len(output.tokens) for output in group.outputs]
            common += 1
    assert common > 1


@pytest.mark.slow
def test_groups_with_equal_rewards_are_replaced(capsys: pytest.CaptureFixture[str], steps: list[Any]) -> None:
    run_of(capsys, "--repeats", "3", "--equal-rewards", "0.5", "--max-head-offpolicyness", "2")
    for kind in (ahead._ReplacingRollouts, ahead._RoundRollouts):
        assert any(
            len(choice.groups_no_longer_in_flight) > len(choice.taken) for found, _, choice, _ in steps if found is kind
        )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--equal-rewards", "1"], "below 1 is needed"),
        (["--equal-rewards", "0.5", "--max-head-offpolicyness", "0"], "--equal-rewards"),
        (["--ahead", "9"], "--ahead"),
    ],
)
def test_arguments_that_do_not_fit(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), *more]) == 2
    assert words in capsys.readouterr().err
