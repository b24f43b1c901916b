"""`areno train`: every flag of the CLI reference, the settings that it stands for, and what is said of mistakes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from areno.api import algorithms, get_algorithm
from areno.api.algorithms import built_in_algorithms
from areno.cli import train_flags as flags
from areno.cli.__main__ import main
from areno.launch import command
from areno.schema.build import with_defaults

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parents[3] / "shared/reference"
DATA = ["--ckpt", "folder", "--dataset-path", "rows.jsonl"]
REWARD = ["--reward-fn-path", "math"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """The configuration that `areno train` makes of the words."""
    assert main(["train", *words, "--cfg", "job"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_the_help_calls_a_value_the_default_only_if_it_is_that_of_all_recipes() -> None:
    found = flags.all_train_flags()
    for flag in found.values():
        if "Default: " in flag.row.setting.help.replace(" null: ", " Default: ") and "Default: " in flag.help:
            assert "(default " not in flag.help, flag.name
            assert flag.declared.help or flag.default == "null", flag.name
    assert found["--clip-ratio-c"].help.endswith("null: no dual clip (default null (grpo), null (gspo), 3.0 (ppo))")


# -- what the reference says


def reference() -> dict[str, tuple[str, str]]:
    """Flag -> (type, default) of the CLI reference. The type is "" for a switch, "both" for one with a --no- form."""
    pages = list(FOLDER.glob("001_*.txt"))
    if not pages:
        pytest.skip(f"the CLI reference is not in {FOLDER}")
    text = pages[0].read_text(encoding="utf-8")
    text = text[text.index("\nBasic") : text.index("\nExamples")]
    found: dict[str, tuple[str, str]] = {}
    # A flag's entry begins at a line's start, or where the value of the entry before it ends.
    starts = list(re.finditer(r"(?:^|(?<=\w\.))--(?=[a-z])", text, re.M))
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        entry = text[start.start() : end.start() if end else None]
        name = re.match(r"--[a-z0-9]+(?:-[a-z0-9]+)*", entry)
        assert name
        rest = entry[name.end() :]
        kind = re.match(r" (TEXT|INTEGER|FLOAT|\[[a-z|]+\])| / --no-", rest)
        if not kind and not rest[:1].isupper():  # named in the text
            continue
        default = re.search(r"Default:\s*([\w.-]+?)\.?(\s|$)", rest)
        kind_text = "" if kind is None else kind[1] or "both"
        found[name[0]] = (kind_text, default[1].rstrip(".") if default else "")
    return found


def test_every_flag_of_the_reference_is_there_with_its_type_and_default() -> None:
    theirs = reference()
    assert len(theirs) == 61, sorted(theirs)
    ours = flags.all_train_flags()
    differing = set()
    for name, (kind, default) in theirs.items():
        if name == "--algo":
            continue
        flag = ours[name]
        is_choice = kind == "TEXT" and flag.type_text.startswith("[")
        own_kind = "both" if flag.negative else flag.type_text
        if kind != own_kind and not is_choice:
            differing.add(name)
        if default and not same(default, flag):
            differing.add(name)
    assert differing == documented_differences()
    extra = ours.keys() - theirs.keys()
    assert not extra


def same(default: str, flag: flags.TrainFlag) -> bool:
    """Whether a default of the reference is ours, for one of the recipes where they differ."""
    ours = [row.default for rows in flag.keys.values() for row in rows[:1]]
    if flag.name == "--min-lr":
        return float(default) == pytest.approx(0.1 * 1e-6)
    if flag.name == "--kl-loss-type":
        return default == "low_var_kl" and set(ours) == {"'k3'"}
    if flag.value is not None:
        return default == "enabled" and "on" in flag.default
    try:
        return any(float(default) == float(value) for value in ours)
    except ValueError:
        return default in [value.strip("'") for value in ours]


def documented_differences() -> set[str]:
    """The flags in the table of differences in docs/reference/cli.md."""
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    section = page[page.index("## Differences") :]
    rows = re.findall(r"^\| (`--.*?) \|", section, re.M)
    return {name for row in rows for name in re.findall(r"`(--[a-z0-9-]+)`", row)}


# -- what a flag does

# (recipe, words) -> the settings that are then not at their defaults.
CASES: list[tuple[str, str, dict]] = [
    ("gspo", "--algo gspo", {}),
    ("sft", "--ckpt folder", {"actor.path": "folder"}),
    ("dpo", "--dataset-path gsm8k:main", {"train_dataset.path": "gsm8k:main"}),
    ("grpo", "--dataset-loader-fn my/loader.py:load", {"train_dataset.loader": "my/loader.py:load"}),
    ("sft", "--epochs 3", {"total_train_epochs": 3}),
    ("ppo", "--max-steps 7", {"total_train_steps": 7}),
    ("gspo", "--world-size 2 --tp-size 2", {"engine.world_size": 2, "engine.tp_size": 2}),
    ("dpo", "--batch-size 4", {"train_dataset.batch_size": 4}),
    ("gspo", "--n-samples 4", {"gconfig.n_samples": 4}),
    ("gspo", "--max-running-prompts 9", {"rollout.max_concurrent_rollouts": 9}),
    ("sft", "--max-prompt-tokens 77", {"train_dataset.max_length": 77}),
    ("grpo", "--max-new-tokens 78", {"gconfig.max_new_tokens": 78}),
    ("grpo", "--max-context-len 4096", {"gconfig.max_tokens": 4096}),
    (
        "gspo",
        "--temperature 0.7 --top-k 5 --top-p 0.9",
        {"gconfig.temperature": 0.7, "gconfig.top_k": 5, "gconfig.top_p": 0.9},
    ),
    ("ppo", "--greedy --n-samples 1", {"gconfig.greedy": True, "gconfig.n_samples": 1}),
    ("gspo", "--eager-decode", {"rollout.eager_decode": True}),
    ("gspo", "--drop-rollout-state", {"rollout.drop_rollout_state": True}),
    ("sft", "--attn-backend native", {"engine.attn_backend": "native"}),
    ("gspo", "--disable-thinking", {"rollout.enable_thinking": False}),
    ("gspo", "--agent-fn run.py --agent-timeout-s 30", {"agent.fn": "run.py", "agent.timeout_s": 30}),
    ("ppo", "--agent-fn a.py --train-tool-results", {"agent.fn": "a.py", "agent.train_tool_results": True}),
    ("gspo", "--reward-fn-path 'my file.py:f'", {"reward.fn": "my file.py:f"}),
    ("ppo", "--reward-ckpt folder", {"reward.path": "folder"}),
    ("sft", "--mini-bs 2", {"actor.mb_spec.mini_bs": 2}),
    ("ppo", "--mini-bs 2", {"actor.mb_spec.mini_bs": 2, "critic.mb_spec.mini_bs": 2}),
    ("sft", "--gradient-accumulation-steps 2", {"actor.gradient_accumulation_steps": 2}),
    ("sft", "--activation-checkpointing", {}),
    (
        "ppo",
        "--no-activation-checkpointing",
        {"actor.gradient_checkpointing": False, "critic.gradient_checkpointing": False},
    ),
    ("sft", "--lr 2e-5", {"actor.optimizer.lr": 2e-5}),
    ("ppo", "--lr 2e-5", {"actor.optimizer.lr": 2e-5}),
    ("dpo", "--min-lr 5e-7", {"actor.optimizer.min_lr_ratio": 0.5}),
    ("sft", "--lr 4e-5 --min-lr 1e-5", {"actor.optimizer.lr": 4e-5, "actor.optimizer.min_lr_ratio": 0.25}),
    (
        "sft",
        "--lr-decay-steps 5 --lr-decay-style linear",
        {"actor.optimizer.lr_decay_steps": 5, "actor.optimizer.lr_scheduler_type": "linear"},
    ),
    ("sft", "--adam-beta1 0.8 --adam-beta2 0.95", {"actor.optimizer.beta1": 0.8, "actor.optimizer.beta2": 0.95}),
    ("sft", "--adam-8bit", {"actor.optimizer.type": "adam_8bit"}),
    ("ppo", "--adam-8bit", {"actor.optimizer.type": "adam_8bit", "critic.optimizer.type": "adam_8bit"}),
    (
        "ppo",
        "--weight-decay 0 --grad-clip-norm 2",
        {"actor.optimizer.weight_decay": 0, "actor.optimizer.gradient_clipping": 2},
    ),
    ("dpo", "--ref-ckpt other", {"ref.path": "other"}),
    ("ppo", "--ref-ckpt other", {"ref.path": "other"}),
    ("grpo", "--ref-ckpt other --kl-loss-coef 0.1", {"ref.path": "other", "ref.offload": False, "actor.kl_ctl": 0.1}),
    ("ppo", "--critic-ckpt other", {"critic.path": "other"}),
    ("ppo", "--critic-lr 1e-4 --critic-warmup-steps 0", {"critic.optimizer.lr": 1e-4, "critic.warmup_steps": 0}),
    (
        "gspo",
        "--tune-params --mem-frac 0.5 --tune-max-samples 9",
        {"tune.enabled": True, "tune.mem_frac": 0.5, "tune.max_samples": 9},
    ),
    ("gspo", "--gspo-clip-eps 4e-4", {"actor.eps_clip": 4e-4}),
    ("grpo", "--grpo-clip-eps 0.3", {"actor.eps_clip": 0.3}),
    ("dpo", "--dpo-beta 0.2", {"actor.beta": 0.2}),
    ("ppo", "--use-kl-loss", {}),
    ("ppo", "--no-use-kl-loss", {"actor.kl_ctl": 0, "ref": None}),
    ("gspo", "--no-use-kl-loss", {}),
    ("gspo", "--use-kl-loss", {"ref.path": None, "ref.offload": False, "actor.kl_ctl": 0.001}),
    ("gspo", "--use-kl-loss --kl-loss-coef 0.1", {"ref.path": None, "ref.offload": False, "actor.kl_ctl": 0.1}),
    ("ppo", "--kl-loss-coef 0.1 --kl-loss-type k1", {"actor.kl_ctl": 0.1, "actor.kl_estimator": "k1"}),
    ("ppo", "--kl-loss-type low_var_kl", {}),
    ("ppo", "--clip-eps 0.3 --clip-ratio-c 5", {"actor.eps_clip": 0.3, "actor.c_clip": 5}),
    ("ppo", "--value-clip-eps 0.4 --value-loss-coef 1", {"critic.eps_clip": 0.4, "critic.value_loss_coef": 1}),
    ("ppo", "--gamma 0.9 --lam 0.8", {"actor.discount": 0.9, "actor.gae_lambda": 0.8}),
    ("gspo", "--save-path there --save-interval 5", {"saver.path": "there", "saver.freq_steps": 5}),
    ("gspo", "--metrics-log-dir there", {"stats_logger.tensorboard.path": "there"}),
]


def batches() -> Iterator[tuple[str, str, dict]]:
    """The cases, as many in one command as have no flag in common: to compose a configuration takes a while."""
    for recipe in built_in_algorithms():
        left = [case for case in CASES if case[0] == recipe]
        while left:
            taken: list[tuple[str, str, dict]] = []
            for case in left:
                names = set(re.findall(r"--(?:no-)?([a-z-]+)", " ".join(words for _, words, _ in taken)))
                mine = set(re.findall(r"--(?:no-)?([a-z-]+)", case[1]))
                keys = {key for _, _, expected in taken for key in expected}
                if not names & mine and not keys & case[2].keys() and not {"lr", "kl-loss-coef"} & mine & names:
                    taken.append(case)
            left = [case for case in left if case not in taken]
            joined: dict = {}
            for _, _, expected in taken:
                joined |= expected
            yield recipe, " ".join(words for _, words, _ in taken), joined


@pytest.mark.parametrize(("recipe", "words", "expected"), list(batches()))
def test_a_flag_sets_its_settings(recipe: str, words: str, expected: dict, capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "--algo", recipe, *shlex.split(words))
    found = {key: value for key, value in flat(told).items() if DEFAULTS[recipe].get(key, "absent") != value}
    assert found == expected | {"experiment_name": "train"}


def flat(settings: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


DEFAULTS = {recipe: flat(with_defaults(get_algorithm(recipe).config, {})) for recipe in built_in_algorithms()}


def test_no_flag_is_left_out_above() -> None:
    tried = {word.replace("--no-", "--") for _, words, _ in CASES for word in words.split() if word.startswith("--")}
    assert tried == flags.all_train_flags().keys() | {"--algo"}


def test_flags_of_other_algorithms_are_ignored_with_a_warning(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["train", *DATA, "--algo", "sft", "--cfg", "job"]) == 0
    expected = capsys.readouterr().out
    assert main(["train", *DATA, "--algo", "sft", "--cfg", "job", "--max-new-tokens", "9", "--critic-lr", "1"]) == 0
    assert capsys.readouterr().out == expected
    assert "--critic-lr is a flag of ppo, so sft ignores it" in caplog.messages
    assert any(text.startswith("--max-new-tokens is a flag of distill, grpo, gspo") for text in caplog.messages)


def test_tuning_is_for_algorithms_that_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(get_algorithm("sft"), "sft", ["--config-name=train", "tune.enabled=true"]) == 2
    assert "tune: unknown key; it is a setting of distill, grpo, gspo, online_dpo and ppo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--tune-params --mem-frac 0", "--mem-frac: is 0.0; it must be more than 0"),
        ("--tune-params --mem-frac 1.1", "--mem-frac: is 1.1; it must be at most 1"),
        ("--tune-params --n-samples 8 --tune-max-samples 4", "--tune-max-samples: is 4, less than the"),
        ("--mem-frac 0.5", "--mem-frac: is 0.5, but --tune-params is false, so nothing is tuned"),
        ("--tune-params scheduler.type=ray", "--tune-params: is true, but scheduler.type=ray"),
    ],
)
def test_wrong_settings_of_the_tuner(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *DATA, *REWARD, *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_all_mistakes_are_told_together_by_the_names_that_the_user_knows(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split("--batch-size many --n-samples 0 gconfig.top_p=2 --min-lr x --kl-loss-type abs")
    assert main(["train", "--dataset-path", "rows.jsonl", *words]) == 2
    error = capsys.readouterr().err
    for line in (
        "--ckpt: missing (",
        "--min-lr: is x; expected a number from 0 to --lr (1e-06 by default)",
        "--batch-size: is 'many'; an integer is expected",
        "--n-samples: is 0; it must be more than 0",
        "gconfig.top_p: is 2",
        "--kl-loss-type: is 'abs'; expected one of 'k1', 'k2', 'k3'",
        "--reward-fn-path: missing (",
    ):
        assert f"\n  {line}" in error, line
    assert error.startswith("error: 7 problems")


@pytest.mark.parametrize("reward_norm", [[], ["actor.reward_norm={}"]])
def test_greedy_samples_are_refused_once_with_all_that_makes_them_work(
    reward_norm: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *DATA, *REWARD, "--greedy", *reward_norm]) == 2
    error = capsys.readouterr().err
    assert "--greedy: is true, so the 8 samples of a prompt (--n-samples) would be equal" in error
    remedy = error.split("), or ")[1].split()
    assert remedy[:3] == ["--n-samples=1", "with", "actor.adv_norm=null"]
    norms = [word for word in remedy if word.endswith("=null")]
    assert main(["train", *DATA, *REWARD, "--greedy", *reward_norm, "--n-samples", "1", *norms, "--cfg", "job"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--algo gspoo", "--algo: there is no 'gspoo'; did you mean gspo"),
        ("--config-name quikstart", "did you mean quickstart"),
        (
            "--algo sft --config-name quickstart",
            "--config-name: quickstart is for grpo, gspo, ppo and online_dpo, not for sft",
        ),
        ("--config-name quickstart --min-lr 1e-5", "--min-lr: is a share of --lr; give that too"),
        (
            "--config-name quickstart --min-lr 1 --lr 0.1",
            "error: --min-lr: is 1; expected a number from 0 to --lr (0",
        ),
        ("--config-name quickstart --min-lr nan --lr 0.1", "error: --min-lr: is nan; expected a number from 0 to --lr"),
        ("--config-name quickstart --min-lr 1 --lr 0", "error: --min-lr: is 1; expected a number from 0 to --lr (0)"),
        ("--config-name quickstart --min-lr 1 --lr=-1", "error: --lr: is -1.0; it must be at least 0"),
        ("--resume nowhere", "--resume: there is no folder"),
        ("--resume=", "error: --resume: is empty; a name is expected"),
        ("--config-dir conf --config-name quickstart foo=1", "foo: unknown key"),
        ("--config-dir conf --config-name absent", "absent"),
        (f"--config-name quickstart seed={'1' * 5000}", "error: cannot read 'seed=111"),
        (f"--config-name quickstart seed={'[' * 500}{']' * 500}", "error: cannot read 'seed=[[["),
        ("--config-name quickstart gconfig.n_samples=1" + "0" * 30, "it must be at most 1000000"),
        ("--config-name quickstart =5", "error: cannot read '=5'; key=value is expected"),
        ("--config-name quickstart +=5", "error: cannot read '+=5'; key=value is expected"),
        (
            "--config-name quickstart --max-steps 1 total_train_steps=2",
            "error: --max-steps: stands for total_train_steps=1,"
            " and total_train_steps=2 is given too; leave one of the two out",
        ),
        ("--config-name quickstart --batch-size 4 ++train_dataset.batch_size=8", "error: --batch-size: stands for "),
        ("--config-name quickstart --max-steps 1 ~total_train_steps", "and ~total_train_steps is given too"),
        (
            "--config-name quickstart --mini-bs 4 actor.mb_spec.max_tokens_per_mb=64",
            "actor.mb_spec.max_tokens_per_mb=null, and actor.mb_spec.max_tokens_per_mb=64 is given too",
        ),
    ],
)
def test_what_is_said_of_a_mistake(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_setting_that_is_given_twice_with_one_value_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    found = flat(
        shown(capsys, *shlex.split("--config-name quickstart --max-steps 1 total_train_steps=1 --min-lr 0 --lr 0"))
    )
    assert (found["total_train_steps"], found["actor.optimizer.lr"]) == (1, 0.0)


@pytest.mark.slow
def test_what_the_run_itself_finds_is_told_by_flags_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--config-name", "quickstart", "--n-samples", "2", "valid_dataset=null"]
    for more, message in {
        "--max-context-len 500": "error: --max-context-len: is 500, the model's context is 128 tokens",
        "gconfig.max_tokens=500": "error: gconfig.max_tokens: is 500, the model's context is 128 tokens",
        "--metrics-log-dir /dev/null": "error: --metrics-log-dir: /dev/null is not a folder",
        "--save-path /dev/null": "error: --save-path: /dev/null",
    }.items():
        with pytest.raises(SystemExit, match=r"^[12]$"):
            main([*words, *more.split()])
        assert message in capsys.readouterr().err, more


def test_a_run_that_goes_on_says_which_algorithm_it_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    config = with_defaults(get_algorithm("grpo").config, yaml.safe_load((ROOT / "conf/quickstart.yaml").read_text()))
    run.mkdir()
    (run / "config.yaml").write_text("# Recipes: grpo\n" + yaml.safe_dump({**config, "defaults": ["recipe", "_self_"]}))
    assert "eps_clip" in shown(capsys, "--resume", str(run), "--grpo-clip-eps", "0.3")["actor"]
    assert main(["train", "--resume", str(run), "--algo", "sft"]) == 2
    assert f"--resume: {run} is a run of grpo, not of sft" in capsys.readouterr().err
    for recipe, message in {
        "# Recipes: mine\n": f"--resume: {run} is a run of mine, which is not installed",
        "": f"--algo: is missing; {run} does not say which algorithm it is a run of",
    }.items():
        (run / "config.yaml").write_text(recipe + "a: 1\n")
        assert main(["train", "--resume", str(run)]) == 2
        assert message in capsys.readouterr().err


def test_flags_change_a_task_and_its_token_budget_gives_way(capsys: pytest.CaptureFixture[str]) -> None:
    found = flat(shown(capsys, *["--config-name", "quickstart", "--mini-bs", "4", "--lr", "1e-5", "gconfig.top_p=0.5"]))
    assert found["actor.path"] == "examples/quickstart/model"
    assert (found["actor.mb_spec.mini_bs"], found["actor.mb_spec.max_tokens_per_mb"]) == (4, None)
    assert (found["actor.optimizer.lr"], found["gconfig.top_p"]) == (1e-5, 0.5)


@pytest.mark.slow
def test_the_run_and_the_command_that_is_told_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is given to a shell again; its configuration is that of the run. So is a text of odd signs."""
    monkeypatch.chdir(tmp_path)
    name = "a 'b\" c, {d}=[e] ü.jsonl"
    Path(name).write_text('{"prompt": "1+2=", "solutions": "3"}\n' * 2)
    words = ["--ckpt", str(ROOT / "examples/quickstart/model"), "--dataset-path", name, "--reward-fn-path", "math"]
    words += shlex.split("--max-steps 1 --batch-size 2 --n-samples 2 --max-new-tokens 4 trial_name=first")
    assert main(["train", *words]) == 0
    told = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("the same run: "))
    program, module, *same_words = shlex.split(told.removeprefix("the same run: python "))
    assert (program, module) == ("-m", "areno.recipes.gspo")
    assert command.run(get_algorithm("gspo"), "again", [*same_words, "--cfg", "job"]) == 0
    again = yaml.safe_load(capsys.readouterr().out)
    first = yaml.safe_load((tmp_path / "outputs/train/first/config.yaml").read_text())
    first.pop("defaults")
    assert again == first
    assert again["train_dataset"]["path"] == name


def test_an_algorithm_of_another_package_has_flags_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(get_algorithm("ppo"), name="mine")
    monkeypatch.setitem(algorithms.registered, "mine", mine)
    assert shown(capsys, "--algo", "mine", "--critic-lr", "0.5")["critic"]["optimizer"]["lr"] == 0.5
