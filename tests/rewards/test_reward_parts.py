"""A reward of several functions, and one with named parts."""

from __future__ import annotations

import asyncio
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import areno
from areno.agents.environment import Environment, replay
from areno.agents.trajectories import AgentItem, AgentTrajectory, AgentTrajectoryTurn, BadTrajectory, plain_results
from areno.api.metrics import evaluation_metrics, rollout_metrics
from areno.config.reward import RewardConfig
from areno.errors import ArenoError, ConfigError
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from areno.schema.build import build
from areno.scoring.functions import part_names
from areno.scoring.pool import RewardPool
from areno.scoring.records import combine_results
from areno.tracking.reader import RunReader
from areno.types import PromptItem, RewardOutcome, RewardRecord, RolloutSequence, ScoredSample

FUNCTIONS = """
import asyncio
loaded = []

def reward_fn(record):
    loaded.append(1)
    return len(record.completion)

def seen(record):
    return len(loaded)

def upper(record):
    return {"reward": 0.5, "first": record.completion[:1].isupper(), "all": record.completion.isupper()}

async def judge(record):
    await asyncio.sleep(0)
    if record.completion == "stuck":
        await asyncio.sleep(60)
    return 2.0

def only_long(record):
    return 1.0 if len(record.completion) > 3 else None

def broken(record):
    return 1 / (len(record.completion) - 2)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def scored(fn, *completions, **settings):
    config = RewardConfig(fn=fn, workers=1, **{"timeout_s": 30.0, **settings})
    with RewardPool(config) as pool:
        return pool.score([RewardRecord(completion=text) for text in completions])


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (0.5, (0.5, {})),
        ({"reward": 1, "a": 0.25, "b": False}, (1.0, {"a": 0.25, "b": 0.0})),
        ({"score": 1, "acc": True}, (1.0, {"acc": 1.0})),  # as verl's functions return it
        ({"reward": 1, "score": 3}, (1.0, {"score": 3.0})),
        ({"a": 0.25, "b": 0.5}, (0.75, {"a": 0.25, "b": 0.5})),
    ],
)
def test_a_dictionary_names_the_parts(returned, expected):
    answer = combine_results([("", 1.0, returned)])
    assert (answer.status, answer.value, answer.parts) == ("ok", *expected)


@pytest.mark.parametrize(
    ("returned", "status", "message"),
    [
        ({}, "error", "returned {}; a dictionary has numbers under names"),
        ({1: 2.0}, "error", "a dictionary has numbers under names"),
        ({"reward": 1.0, "a": "good"}, "error", "returned 'a': 'good' (str); a reward is a number"),
        ({"reward": 1.0, "a": float("nan")}, "not_finite", "returned 'a': nan"),
        ({"a": 3e38, "b": 3e38}, "not_finite", "returned parts with the sum 6e+38"),
        (None, "error", "returned None (NoneType); a reward is a number"),
    ],
)
def test_a_dictionary_that_is_no_reward(returned, status, message):
    answer = combine_results([("", 1.0, returned)])
    assert (answer.status, answer.value, answer.parts) == (status, None, {})
    assert message in answer.message


def test_several_functions_are_a_weighted_sum_of_parts(file):
    fn = [str(file), f"{file}:upper", f"{file}:judge"]
    first, second = scored(fn, "Abc", "AB", weights=[2.0, 1.0, -0.25])
    assert (first.value, second.value) == (2 * 3 + 0.5 - 0.5, 2 * 2 + 0.5 - 0.5)
    assert first.parts == {"mine": 3.0, "upper": 0.5, "upper/first": 1.0, "upper/all": 0.0, "judge": 2.0}
    assert second.parts["upper/all"] == 1.0, "the parts are not weighted"


def test_functions_of_one_file_share_a_module(file):
    [outcome] = scored([str(file), f"{file}:seen"], "a")
    assert outcome.parts == {"mine": 1.0, "seen": 1.0}


def test_a_function_may_have_no_opinion_of_a_sample(file):
    fn = [f"{file}:only_long", f"{file}:upper"]
    short, long = scored(fn, "abc", "abcd")
    assert (short.value, long.value) == (0.5, 1.5)
    assert "only_long" not in short.parts
    assert long.parts["only_long"] == 1.0
    short, long = scored([f"{file}:only_long"], "abc", "abcd")
    assert (short.status, short.message) == ("error", "every function returned None; at least one has to give a reward")
    assert long.value == 1.0


@pytest.mark.parametrize("other", ["upper", "judge"])
def test_a_function_that_fails_fails_the_sample(file, other):
    fine, bad = scored([f"{file}:broken", f"{file}:{other}"], "abc", "ab")
    assert fine.value == (1.5 if other == "upper" else 3.0)
    assert (bad.status, bad.value, bad.parts) == ("error", None, {})
    assert bad.message == "ZeroDivisionError: division by zero (mine.py:25)"


@pytest.mark.slow
def test_a_function_that_hangs_costs_its_sample_only(file):
    outcomes = scored([str(file), f"{file}:judge"], "a", "stuck", "bb", timeout_s=1.5)
    assert [outcome.status for outcome in outcomes] == ["ok", "timeout", "ok"]


def test_all_that_is_wrong_is_told_at_once(file):
    fn = [f"{file}:missing", f"{file}:loaded", str(file)]
    with pytest.raises(ConfigError) as told:
        scored(fn, "a")
    assert [problem.key for problem in told.value.problems] == ["reward.fn"] * 2
    assert "has no function missing" in str(told.value)
    assert "loaded in" in str(told.value)


def test_names_of_the_parts():
    assert part_names(["a.py", "b.py:format", "math"]) == ["a", "format", "math"]
    assert part_names(["a.py:format", "b.py:format", "x/c.py"]) == ["a.format", "b.format", "c"]
    with pytest.raises(ConfigError, match=r"two functions called a\.reward_fn"):
        part_names(["x/a.py", "y/a.py"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fn": [], "path": "x"}, "fn: is an empty list"),
        ({"fn": ["math"], "weights": [1, 2]}, "weights: has 2 numbers for 1 function;"),
        ({"path": "x", "weights": [1.0]}, "weights: is .*so no function is called"),
        ({"fn": "math", "length": {"max_tokens": 3}}, "length: has settings, but reward.fn does not name length"),
        ({"fn": ["length"]}, "length: is in reward.fn, but has no limit"),
        ({"fn": "code", "timeout_s": 5}, "code.timeout_s: is 10.0, which has to be less than reward.timeout_s=5.0"),
        ({"fn": "format", "format": {"pattern": "("}}, "format.pattern: is '\\(', which is no regular expression"),
        ({"fn": ["maths"]}, "reward.fn: is 'maths'.*did you mean math"),
        ({"fn": [""]}, "reward.fn: is ''; expected file.py"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    data = {"experiment_name": "e", "actor": {"path": "m"}, "train_dataset": {"path": "d"}, "valid_dataset": None}

    def start():
        config = build(GSPOConfig, {**data, "reward": settings}, [], lambda key: "")
        RewardPool(config.reward).start()

    with pytest.raises(ConfigError, match=message):
        start()


def test_a_script_may_give_several_functions(tmp_path):
    def short(record):
        return -len(record.completion)

    functions = [short, lambda record: 1.0]
    with RewardPool(RewardConfig(workers=1, weights=[0.5, 2.0]), functions) as pool:
        [outcome] = pool.score([RewardRecord(completion="abcd")])
    assert (outcome.value, outcome.parts) == (0.0, {"short": -4.0, "<lambda>": 1.0})
    assert pool.name == "short + <lambda>"
    with pytest.raises(ConfigError, match=r"reward.weights: has 1 numbers for 2 functions"):
        RewardPool(RewardConfig(weights=[1.0]), functions).start()
    with pytest.raises(ConfigError, match="two functions called <lambda>"):
        RewardPool(RewardConfig(), [lambda record: 1.0, lambda record: 2.0]).start()


def sample(value, parts):
    sequence = RolloutSequence(resp_tokens=[1], resp_logprobs=[0.0])
    item = PromptItem(prompt="", text="", tokens=[0])
    return ScoredSample(item=item, sequence=sequence, completion="", outcome=RewardOutcome(value, parts=parts))


def test_parts_are_metrics():
    samples = [sample(1.0, {"a": 1.0, "b/c": 3.0}), sample(0.0, {"a": 0.0})]
    scalars = rollout_metrics(samples, [0.0, 0.0])
    parts = {name: value for name, value in scalars.items() if name.startswith("rollout/reward/")}
    assert parts == {
        "rollout/reward/a": 0.5,
        "rollout/reward/b/c": 3.0,
        "rollout/reward/a_std": 0.5,
        "rollout/reward/b/c_std": 0.0,
    }
    evaluated = evaluation_metrics(samples, 1)
    assert (evaluated["reward/a"], evaluated["reward/b/c"]) == (0.5, 3.0)


STEPS = """
def reward_fn(record):
    return {"reward": float(len(set(record.tokens))), "step": record.step, "epoch": record.epoch}
"""


def test_a_record_knows_step_and_epoch_and_a_run_keeps_the_parts(tmp_path):
    file = tmp_path / "steps.py"
    file.write_text(STEPS)
    settings = [f"reward.fn={file}", "reward.workers=1", "total_train_steps=3", "train_dataset.batch_size=2"]
    settings += ["gconfig.n_samples=2", "gconfig.max_new_tokens=4", "engine.device=cpu", "rollout.dump_to_file=true"]
    config = load(GSPOConfig, "quickstart", [*settings, "valid_dataset.max_rows=2"])
    rows = [{"prompt": f"{n}+1=", "solutions": "1"} for n in range(4)]
    with areno.PolicyOnlyTrainer(config, run_dir=tmp_path / "run", train_dataset=rows) as trainer:
        trainer.fit()
    run = RunReader(tmp_path / "run")
    assert run.series("rollout/reward/step").values == [1.0, 2.0, 3.0]
    assert run.series("rollout/reward/epoch").values == [0.0, 0.0, 1.0]
    assert run.samples(2)[0]["parts"] == {"step": 2.0, "epoch": 0.0}
    assert run.series("eval/reward/step").values[-1] == 3.0


def test_errors_with_all_of_their_traceback(file):
    config = RewardConfig(fn=f"{file}:broken", workers=1)
    with RewardPool(config, tracebacks=True) as pool:
        bad, _ = pool.score([RewardRecord(completion="ab"), RewardRecord(completion="abc")])
    lines = bad.message.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "mine.py" in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    with pytest.raises(ArenoError), RewardPool(config) as pool:
        pool.score([RewardRecord(completion="ab")])


class Raising:
    def __float__(self) -> float:
        raise KeyError("no")


def given_by(kind: str, reward: object) -> float:
    """What a reward function, an agent, an environment or a part of an agent's reward counts as."""
    if kind == "function":
        answer = combine_results([("", 1.0, reward)])
        if answer.value is None:
            raise ValueError(answer.message)
        return answer.value
    if kind == "environment":
        environment = Environment()
        environment.reset = list  # type: ignore[method-assign]
        environment.answer = lambda text: ([], reward, True)  # type: ignore[method-assign, assignment, return-value]
        return asyncio.run(replay(environment, [{"role": "assistant", "content": "a"}]))
    item = AgentItem("a", {}, [1])
    tokens = {"areno": {"session": "s"}, "choices": [{"message": {"role": "assistant", "content": "a"}}]}
    turns = [AgentTrajectoryTurn(item, [{"role": "user", "content": "a"}], tokens)]
    how = {"reward": 0.0, "parts": {"a": reward}} if kind == "part" else {"reward": reward}
    [found] = plain_results(AgentTrajectory(turns, **how), [item])  # type: ignore[arg-type]
    if isinstance(found, BadTrajectory):
        raise found
    [turn] = found
    return turn["outcome"][1]["a"] if kind == "part" else turn["outcome"][0]


@pytest.mark.parametrize("kind", ["function", "agent", "part", "environment"])
def test_there_is_one_rule_for_what_a_reward_is(kind):
    half = [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Decimal("0.5"), Fraction(1, 2)]
    assert [given_by(kind, reward) for reward in half] == [0.5] * 6
    assert [given_by(kind, reward) for reward in (True, np.bool_(True), np.int64(1), 1, torch.tensor(1))] == [1.0] * 5
    assert given_by(kind, False) == given_by(kind, np.float32(-0.0)) == 0.0
    text = ["1.0", b"1.0", np.str_("1.0"), np.bytes_(b"1.0"), "", "nan"]
    other = [1j, np.complex64(1), [1.0], (), {1}, np.array([1.0, 2.0]), object(), Raising()]
    for reward in [*text, *other, math.nan, -math.inf, np.float32("inf"), 1e39, -1e300, 10**400, Decimal("1e50")]:
        with pytest.raises((ValueError, BadTrajectory, KeyError)) as caught:
            given_by(kind, reward)
        assert str(caught.value)
        if kind in ("agent", "part"):
            assert caught.type is BadTrajectory
