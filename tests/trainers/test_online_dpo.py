"""Online DPO: which samples become pairs, the loss of the pairs, and runs with all that a policy run may have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import areno
from areno.api import get_algorithm
from areno.cli.__main__ import main
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.loss_fns import choose_pairs
from areno.plan.forecast import forecast
from areno.plan.hardware import local_cpu
from areno.recipes.online_dpo import OnlineDPOConfig
from areno.tracking.reader import RunReader
from areno.types import TrainSequence
from tests.helpers.agent_runs import AGENTS
from tests.helpers.agent_runs import run as agent_run
from tests.helpers.policy_runs import MODEL, play, trained
from tests.helpers.recipe_runs import train
from tests.helpers.reward_functions import always_one, odd_first_digit
from tests.helpers.variant_runs import Variant, close, player

TASK = "quickstart_online_dpo"
ONE_PAIR = ["pairs_per_prompt=1"]


@pytest.fixture
def online(tmp_path: Path, models: dict[str, Path]) -> Variant:
    """Runs online DPO with settings, 4 samples of 4 prompts a step, and a reward model."""
    return player("online_dpo", tmp_path, models["reward"], "pairs_per_prompt=1")


@pytest.mark.parametrize("most", [1, 2, 3])
def test_pairs_are_the_best_and_the_worst_samples(most: int) -> None:
    random = np.random.default_rng(most)
    for _ in range(50):
        groups = random.integers(0, 4, 20).tolist()
        rewards = random.integers(0, 5, 20).astype(float).tolist()
        pairs, tied = choose_pairs(rewards, groups, most)
        expected, n_tied = [], 0
        for group in sorted(set(groups)):
            left = [index for index in range(20) if groups[index] == group]
            for _ in range(most):
                if len(left) < 2:
                    break
                best = max(left, key=lambda index: (rewards[index], -index))  # the first of equal ones
                worst = min(left, key=lambda index: (rewards[index], -index))  # the last of equal ones
                left = [index for index in left if index not in (best, worst)]
                if rewards[best] > rewards[worst]:
                    expected.append((best, worst))
                else:
                    n_tied += 1
        assert pairs == expected
        assert tied == n_tied


def test_a_worked_example_of_pairs() -> None:
    rewards, groups = [0.2, 0.9, 0.5, 0.9, 1.0, 1.0], [0, 0, 0, 0, 1, 1]
    assert choose_pairs(rewards, groups, 1) == ([(1, 0)], 1)
    assert choose_pairs(rewards, groups, 2) == ([(1, 0), (3, 2)], 1)
    assert choose_pairs([math.nan, 0.0, 1.0], [0, 0, 0], 1) == ([(2, 1)], 0)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def odds(score: float) -> float:
    return score - math.log1p(-math.exp(score))


def expected_loss(loss_type: str, rows: list[Any]) -> float:
    """The mean of the losses of pairs in float64, with the policy of the rollout."""
    found = []
    for chosen, rejected in zip(rows[0::2], rows[1::2], strict=True):
        sums = [sum(trained(row, "logprobs")) for row in (chosen, rejected)]
        means = [float(np.mean(trained(row, "logprobs"))) for row in (chosen, rejected)]
        if loss_type in ("sigmoid", "ipo"):
            refs = [np.array(trained(row, "ref_logprobs")) for row in (chosen, rejected)]
            one, two = (
                np.array(trained(row, "logprobs")) - ref for row, ref in zip((chosen, rejected), refs, strict=True)
            )
            loss = -log_sigmoid(0.3 * (one.sum() - two.sum()))
            found.append(loss if loss_type == "sigmoid" else (one.mean() - two.mean() - 1 / 0.6) ** 2)
        elif loss_type == "simpo":
            found.append(-log_sigmoid(0.3 * (means[0] - means[1]) - 0.5))
        else:
            found.append(-means[0] - 0.3 * log_sigmoid(odds(means[0]) - odds(means[1])))
        assert sums[0] < 0
    return float(np.mean(found))


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "simpo", "orpo"])
def test_the_best_and_the_worst_sample_of_each_prompt_are_trained(
    loss_type: str, online: Variant, models: dict[str, Path]
) -> None:
    ref = [f"ref.path={models['lm']}"] if loss_type in ("sigmoid", "ipo") else ["ref=null"]
    run = online(f"actor.loss_type={loss_type}", "actor.beta=0.3", *ref)
    for step, rows in enumerate(run.rows):
        samples = run.samples(step + 1)
        groups = [samples[i : i + 4] for i in range(0, 16, 4)]
        assert len(rows) == 8
        for pair, group in zip(range(0, 8, 2), groups, strict=True):
            rewards = [sample["reward"] for sample in group]
            assert [rows[pair].reward, rows[pair + 1].reward] == close([max(rewards), min(rewards)])
            assert trained(rows[pair], "advantages")[0] == 1.0
            assert trained(rows[pair + 1], "advantages")[0] == -1.0
        assert run.series("train/loss")[step] == close(expected_loss(loss_type, rows), 1e-4)
        assert run.series("rollout/pairs")[step] == 4
        apart = np.mean([rows[i].reward - rows[i + 1].reward for i in range(0, 8, 2)])
        assert run.series("rollout/pair_reward_diff")[step] == close(apart)
    assert run.series("rollout/num_sequences") == [16, 16]
    assert run.series("rollout/tied_pairs") == [0, 0]
    assert ("time/ref" in run.names()) == (loss_type in ("sigmoid", "ipo"))


def test_more_pairs_of_a_prompt_and_more_updates(online: Variant) -> None:
    words = ["pairs_per_prompt=2", "total_train_steps=1", "saver.freq_steps=1"]
    moved = []
    for n_updates in (1, 4):
        run = online(*words, f"actor.ppo_n_minibatches={n_updates}")
        before, after = (load_file(f / "model.safetensors") for f in (MODEL, run.folder / "checkpoints/latest"))
        moved.append(sum((after[name] - before[name]).norm().item() for name in after))
    assert moved[1] > 1.5 * moved[0]  # each update of Adam moves the weights by about the learning rate
    rows, samples = run.rows[0], run.samples(1)
    expected = []
    for start in range(0, 16, 4):
        rewards = sorted(sample["reward"] for sample in samples[start : start + 4])
        pairs = [(rewards[3], rewards[0]), (rewards[2], rewards[1])]
        expected += [reward for pair in pairs for reward in pair if pair[0] > pair[1]]  # equal completions tie
    assert len(rows) > 8
    assert [row.reward for row in rows] == close(expected)


@pytest.mark.slow
def test_equal_rewards_are_no_pair(tmp_path: Path) -> None:
    words = ["reward.workers=1", "gconfig.n_samples=2", "saver.freq_steps=1", "total_train_steps=3", *ONE_PAIR]
    run = play("online_dpo", tmp_path / "some", *words, task=TASK, reward_fn=odd_first_digit)
    tied, pairs = run.series("rollout/tied_pairs"), run.series("rollout/pairs")
    assert max(tied) > 0
    assert [one + other for one, other in zip(tied, pairs, strict=True)] == [4, 4, 4]
    assert [len(rows) for rows in run.rows] == [2 * n for n in pairs if n]

    filled = play(
        "online_dpo", tmp_path / "filled", *words, "rollout.dynamic_sampling=true", task=TASK, reward_fn=odd_first_digit
    )
    assert max(filled.series("rollout/sampling_rounds")) > 1
    assert [len(rows) for rows in filled.rows] == [8, 8, 8]

    none = play("online_dpo", tmp_path / "none", *words, task=TASK, reward_fn=always_one)
    assert none.rows == []
    assert none.series("rollout/pairs") == [0, 0, 0]
    assert "train/loss" not in none.names()
    assert (none.folder / "logs/run.log").read_text().count("there is no pair to train on") == 3
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, none.folder / "checkpoints/latest"))
    assert all(torch.equal(before[name], after[name]) for name in after)


@pytest.mark.slow
def test_completions_that_were_cut_off_are_in_no_pair(online: Variant) -> None:
    short = ["gconfig.max_new_tokens=3", "train_dataset.batch_size=8"]
    whole, masked = online(*short), online(*short, "actor.mask_no_eos_with_zero=true")
    assert max(len(trained(row, "logprobs")) for row in whole.rows[0]) == 3
    kept = [sample for sample in masked.samples(1) if sample["finish_reason"] == "stop"]
    rewards = {round(sample["reward"], 5) for sample in kept}
    assert len(kept) < 32
    assert all(round(row.reward, 5) in rewards for row in masked.rows[0])


def test_long_completions_lose_pairs(online: Variant) -> None:
    penalty = ["actor.overlong_reward_penalty=true", "actor.overlong_tokens=4", "actor.overlong_penalty_factor=1000"]
    run = online("gconfig.max_new_tokens=5", *penalty)
    for rows in run.rows:
        for chosen, rejected in zip(rows[0::2], rows[1::2], strict=True):
            assert len(trained(chosen, "logprobs")) <= len(trained(rejected, "logprobs"))


def test_a_judge_that_compares_makes_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.config.judge.CHOICES", ("1", "2"))  # the vocabulary has no letters
    words = ["reward.fn=null", f"reward.judge.path={MODEL}", "reward.judge.compare=true", *ONE_PAIR]
    run = play("online_dpo", tmp_path / "run", *words, "reward.judge.template='{prompt}{first}+{second}='", task=TASK)
    for step, rows in enumerate(run.rows):
        assert len(rows) == 2 * run.series("rollout/pairs")[step] > 0
        scores = [sample["parts"]["judge"] for sample in run.samples(step + 1)]
        assert [row.reward for row in rows[0::2]] == close([max(scores[i : i + 4]) for i in range(0, 16, 4)])


def hf_logprobs(folder: Path, row: Any, temperature: float = 2.0) -> list[float]:
    tokens = torch.tensor([list(row.tokens)])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        table = (model(tokens).logits[0].double() / temperature).log_softmax(-1)
    places = [place for place, masked in enumerate(row.prompt_mask) if not masked]
    return [table[place - 1, tokens[0, place]].item() for place in places]


def test_the_reference_of_adapters_is_their_base(tmp_path: Path, models: dict[str, Path]) -> None:
    words = ["reward.fn=null", f"reward.path={models['reward']}", "actor.use_lora=true", "actor.optimizer.lr=1e-2"]
    run = play("online_dpo", tmp_path / "run", *words, *ONE_PAIR, task=TASK)
    second = run.rows[1]
    for row in second[:4]:
        assert trained(row, "ref_logprobs") == close(hf_logprobs(MODEL, row), 1e-4)
    assert max(abs(np.subtract(trained(row, "ref_logprobs"), trained(row, "logprobs"))).max() for row in second) > 0.01
    assert (run.folder / "checkpoints/latest/adapter_config.json").is_file()


@pytest.mark.slow
def test_agents_make_pairs_of_samples_with_one_row(tmp_path: Path) -> None:
    words = ["total_train_steps=1", *ONE_PAIR]
    run = agent_run(tmp_path / "turns", "quick_turns.py", *words, recipe="online_dpo")
    [n_pairs] = run.series("rollout/pairs")
    assert n_pairs > 0
    assert [len(trained(row, "logprobs")) for row in run.rows[0]] == [12] * int(2 * n_pairs)  # two turns of six tokens
    agent = (AGENTS / "quick_turns.py").read_text()
    forgets = agent.replace("messages.append({", "messages.clear()\n                messages.append({")
    (tmp_path / "forgets.py").write_text(forgets)
    run = agent_run(tmp_path / "apart", str(tmp_path / "forgets.py"), *words, recipe="online_dpo")
    assert run.rows == []
    assert "16 samples of this step are in no pair" in (run.folder / "logs/run.log").read_text()


def test_samples_of_older_weights_need_no_correction(online: Variant, caplog: pytest.LogCaptureFixture) -> None:
    run = online("rollout.max_head_offpolicyness=1", "total_train_steps=3")
    assert len(run.rows) == 3
    assert "tokens of older weights" not in (run.folder / "logs/run.log").read_text()


def test_few_pairs_are_shared_by_many_copies(online: Variant, tmp_path: Path, monkeypatch) -> None:
    """Each copy of the model gets a pair in each update, and each pair has the same weight."""
    algorithm = get_algorithm("online_dpo")
    config = load(algorithm.config, TASK, ["valid_dataset=null", "engine.device=cpu", "actor.ppo_n_minibatches=4"])
    given: list[Any] = []
    with algorithm.trainer(config, tmp_path / "run") as trainer:
        monkeypatch.setattr(
            "areno.trainers.online_dpo.update_actor",
            lambda setup, rows, **how: given.append((rows, how["n_minibatches"])),
        )
        engine = trainer.setup.trainer.engine
        monkeypatch.setattr(type(engine.spec.layout), "n_data_parallel_groups", 4)
        for n_pairs in (1, 3, 9, 40):
            trainer.train_pairs([TrainSequence(reward=i) for i in range(2 * n_pairs)])
    rows, updates = zip(*given, strict=True)
    assert [len(each) // 2 for each in rows] == [4, 6, 9, 40]
    assert updates == (1, 1, 2, 4)
    assert [row.reward for row in rows[1]] == [*range(6)] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["gconfig.n_samples=6"], "pairs_per_prompt: is 4, which needs 8 samples of a prompt, two for each pair"),
        (["actor.loss_type=simpo"], "ref: is loaded but not used by actor.loss_type=simpo; set ref=null"),
        (["ref=null"], "ref: is null, but actor.loss_type=sigmoid compares with a reference model; leave it out"),
        (["actor.ppo_n_minibatches=3"], "actor.ppo_n_minibatches: is 3, which does not divide the 128 pairs of a step"),
        (["actor.reward_scaling=2"], "actor.reward_scaling: unknown key"),
        (["actor.gradient_accumulation_steps=2"], "actor.gradient_accumulation_steps: unknown key"),
        (["teacher=default"], "teacher: unknown key"),
    ],
)
def test_settings_that_do_not_fit(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(OnlineDPOConfig, TASK, settings)
    assert message in str(caught.value)


def test_advantages_of_ones_own_are_refused(tmp_path: Path) -> None:
    config = load(OnlineDPOConfig, TASK, [])
    with pytest.raises(ConfigError, match="takes no advantage_fn"):
        areno.OnlineDPOTrainer(config, run_dir=tmp_path / "run", advantage_fn=lambda *_: None)


@pytest.mark.parametrize(("pairs", "n_trained"), [(1, 2), (2, 4), (4, 8)])
def test_the_plan_counts_the_samples_of_pairs(pairs: int, n_trained: int) -> None:
    words = [f"pairs_per_prompt={pairs}", "train_dataset.batch_size=16"]
    config = load(OnlineDPOConfig, TASK, words)
    found = forecast(config, local_cpu(), 1)
    assert found.n_rows == 16 * n_trained
    tokens = {phase.name: phase.n_tokens for phase in found.phases}
    each = found.lengths.prompt + found.lengths.answer
    assert tokens["train actor"] == tokens["score ref"] == 16 * n_trained * each
    assert tokens["rollout"] == 16 * 8 * found.lengths.answer


def test_the_plan_of_the_command_line_says_how_many_samples_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algo", "online_dpo", "--config-name", TASK, "--device", "cpu", "pairs_per_prompt=2"]
    assert main(["plan", *words]) == 0
    assert "256 samples (32 prompts x 8), 128 of them trained" in capsys.readouterr().out


@pytest.mark.slow
def test_a_replay_shows_the_sample_and_says_why_it_has_no_loss(
    tmp_path: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["total_train_steps=2", "saver.freq_steps=1", "valid_dataset=null", "rollout.dump_to_file=true"]
    folder = train("online_dpo", tmp_path, *words, "train_dataset.batch_size=4", f"reward.path={models['reward']}")
    capsys.readouterr()
    advantages = [sample.get("advantage") for sample in RunReader(folder).samples(2)]
    assert {-1.0, 1.0} <= set(advantages) <= {-1.0, 1.0, None}
    for number in (advantages.index(1.0), advantages.index(-1.0)):
        assert main(["replay", str(folder), "--step", "2", "--sample", str(number), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["loss"] is None
        assert found["missing"] == ["the loss: that of a pair needs both samples"]
        for token in found["tokens"]:
            assert not token["trained"] or token["now"] == close(token["then"], 2e-4)  # recorded with 4 digits


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["actor.loss_type=ipo"], ["pairs_per_prompt=1"]])
def test_the_quickstart_learns(settings: list[str], tmp_path: Path) -> None:
    algorithm = get_algorithm("online_dpo")
    half = "total_train_steps=50"  # of the file's, after which the rewards hardly rise
    config = load(algorithm.config, TASK, ["engine.device=cpu", half, *settings])
    with algorithm.trainer(config, tmp_path / "run") as trainer:
        accuracy = trainer.fit()
        rewards = trainer.run.history["reward_mean"]
    assert np.mean(rewards[:3]) < 0.5
    assert np.mean(rewards[-5:]) > 0.85
    assert accuracy > 0.9
