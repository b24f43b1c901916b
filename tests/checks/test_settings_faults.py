"""Settings that are allowed, but leave a run nothing to learn: each is found by name, and nothing in the run itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.checks.inputs.findings import Finding
from tests.helpers.checked import data_file, failed, findings, red

GSPO, GRPO, PPO = "gspo quickstart", "grpo quickstart", "ppo quickstart_ppo"
DPO, KTO, SFT, ONLINE = "dpo quickstart_dpo", "kto quickstart_kto", "sft quickstart_base", "online_dpo quickstart"
OPTIMIZER = "actor.optimizer"
REFERENCE = ("ref=default",)
DECAYS = (f"{OPTIMIZER}.lr_scheduler_type=linear",)


def said(found: list[Finding], name: str) -> str:
    return "\n".join(each.line for each in found if each.name == name and each.verdict == "red")


@pytest.mark.parametrize("command", [GSPO, GRPO, PPO, DPO, KTO, SFT, ONLINE, "rw quickstart_rw", "prm quickstart_prm"])
def test_settings_that_come_with_areno_are_green(command: str) -> None:
    found = findings(command, only="settings")
    assert not red(found), found
    assert not failed(found)
    assert {"run-length", "lr-schedule", "update-size"} <= {each.name for each in found}


@pytest.mark.parametrize(
    ("command", "settings", "name", "text"),
    [
        (PPO, ["total_train_steps=20"], "critic-warmup", "the policy is never trained"),
        (PPO, ["total_train_steps=35"], "critic-warmup", "trained in 5 steps alone"),
        (GSPO, [*DECAYS, f"{OPTIMIZER}.lr_decay_steps=10"], "lr-schedule", "of 100 updates"),
        (GSPO, [f"{OPTIMIZER}.warmup_steps_proportion=0.9"], "lr-schedule", "warms up in 90 updates"),
        (GSPO, ["evaluator.freq_steps=500"], "evaluations", "at its end alone"),
        (GSPO, ["total_train_steps=1"], "run-length", "1 steps"),
        (GSPO, ["total_train_n_seqs=8"], "run-length", "1 steps"),
        (GSPO, [f"{OPTIMIZER}.lr=1e-11"], "update-size", "at most about 1e-09"),
        (SFT, [f"{OPTIMIZER}.lr=10"], "update-size", "more than weights of a model are"),
        (SFT, [f"{OPTIMIZER}.type=sgd", f"{OPTIMIZER}.lr=1e-8"], "update-size", "type (sgd)"),
        (GSPO, [f"{OPTIMIZER}.eps=0.1"], "update-size", "eps=0.1 is more than a gradient"),
        (GSPO, [f"{OPTIMIZER}.gradient_clipping=1e-9"], "update-size", "gradient_clipping=1e-09"),
        (GSPO, [f"{OPTIMIZER}.beta1=0.999", f"{OPTIMIZER}.beta2=0.9"], "update-size", "are they exchanged"),
        (GSPO, [f"{OPTIMIZER}.weight_decay=100"], "weight-decay", "of what the gradient moves it"),
        (DPO, [f"{OPTIMIZER}.weight_decay=9", f"{OPTIMIZER}.lr=2e-2"], "weight-decay", "shrinks weights to 0%"),
        (GRPO, ["actor.eps_clip=1e-7"], "clip-range", "rounding alone"),
        (GRPO, ["actor.eps_clip=2"], "clip-range", "nothing is clipped"),
        (PPO, ["actor.c_clip=1.1"], "clip-range", "c_clip=1.1 lies within the clip range"),
        (GRPO, ["actor.kl_ctl=20", *REFERENCE], "loss-weights", "the KL dwarfs advantages"),
        (GRPO, ["+actor.entropy_bonus={coef: 5.0}"], "loss-weights", "the entropy dwarfs advantages"),
        (DPO, ["actor.beta=1e-6"], "loss-weights", "hardly depends on the answers"),
        (KTO, ["actor.beta=500"], "loss-weights", "held at the reference"),
        (PPO, ["actor.gae_lambda=0"], "credit", "the critic's guess"),
        (PPO, ["critic.eps_clip=1e-5"], "credit", "never reaches the rewards"),
        (GRPO, ["gconfig.temperature=0.001"], "sampling", "nearly equal"),
        (GRPO, ["gconfig.top_k=1"], "sampling", "the most likely token alone"),
        (GRPO, ["gconfig.temperature=8"], "sampling", "noise"),
        (GSPO, ["gconfig.ignore_eos=true"], "sampling", "no completion ends"),
        (GSPO, ["gconfig.min_new_tokens=16"], "sampling", "no completion ends"),
        (GSPO, ["actor.reward_scaling=-1"], "reward-shaping", "the better one"),
        (GSPO, ["actor.reward_bias=5", "actor.reward_clip=1"], "reward-shaping", "both become 1"),
        (
            GSPO,
            [
                "actor.overlong_reward_penalty=true",
                "actor.overlong_tokens=16",
                "actor.overlong_penalty_factor=1",
            ],
            "reward-shaping",
            "begins at 0 tokens",
        ),
    ],
)
def test_settings_that_defeat_a_run_are_found(command: str, settings: list[str], name: str, text: str) -> None:
    found = findings(command, *settings, only="settings")
    assert not failed(found), failed(found)
    assert text in said(found, name), found


def test_completions_without_room_for_any_worked_solution_are_found(tmp_path: Path) -> None:
    steps = " ".join(f"Step {n}: I add {n} and get {n + 1}." for n in range(20))
    rows = [{"question": f"What is {n} + 1?", "answer": f"{steps}\n#### {n + 1}"} for n in range(40)]
    given = [f"train_dataset.path={data_file(tmp_path / 'rows.jsonl', rows)}", "reward.fn=math"]
    given += ["actor.path=examples/agentic/small_model/model", "train_dataset.max_length=256"]
    assert "are longer than" in said(
        findings("gspo prompts", *given, "gconfig.max_new_tokens=32", only="settings"), "answer-room"
    )
    assert not red(findings("gspo prompts", *given, "gconfig.max_new_tokens=400", only="settings"))


@pytest.mark.parametrize(("discount", "verdict"), [(0.9, "red"), (0.9999, "green")])
def test_a_discount_of_tokens_that_hides_the_reward_is_found(discount: float, verdict: str, tmp_path: Path) -> None:
    given = ("train_dataset.loader=null", "valid_dataset=null", "actor.gae_lambda=0.99", "critic.warmup_steps=0")
    given += (f"actor.discount={discount}", "gconfig.max_new_tokens=100")
    for n_words, where in ((10, "the solutions of the rows"), (40, "gconfig.max_new_tokens")):
        numbers = range(10, 60)
        rows = [{"prompt": f"{n}+{n}=", "solutions": str(2 * n), "work": f"{n} and " * n_words} for n in numbers]
        path = data_file(tmp_path / "rows.jsonl", rows)
        found = findings("ppo quickstart", *given, f"train_dataset.path={path}", only="settings")
        [line] = [each for each in found if each.name == "credit"]
        assert line.verdict == verdict
        assert where in line.line
        assert f"actor.discount={discount:g}" in line.line or "brings 0." in line.line
