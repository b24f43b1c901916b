"""Runs with a teacher: the recipe distill, teachers beside rewards, prompts of their own, resuming, and refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areno.api import get_algorithm
from areno.engine.engine import Engine
from areno.engine.train.training_rows import read_training_rows
from areno.errors import ConfigError, DataError
from areno.launch import command
from areno.launch.compose import load
from areno.plan.plan import plan_of_experiment
from areno.report.replayed_tokens import Replay, replay
from areno.tracking.reader import RunReader
from areno.trainers.distill import DistillTrainer
from areno.types import TrainSequence
from tests.helpers.distill_runs import DISTILL, NO_PATH, ROWS, SHORT, run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a few steps of GRPO."""
    folder = tmp_path_factory.mktemp("teacher")
    settings = ["total_train_steps=12", "valid_dataset=null"]
    algorithm = get_algorithm("grpo")
    with algorithm.trainer(load(algorithm.config, "quickstart", settings), folder) as trainer:
        trainer.fit()
    return folder / "checkpoints/latest"


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sampled_reverse_kl", "reverse_kl", "forward_kl", "jsd"])
def test_a_student_follows_its_teacher(loss_type: str, teacher: Path, tmp_path: Path) -> None:
    settings = [f"teacher.path={teacher}", f"teacher.loss_type={loss_type}", "total_train_steps=12", *DISTILL]
    settings += [
        "train_dataset.batch_size=20",
        "gconfig.n_samples=8",
        "actor.optimizer.lr=5e-4",
        "total_train_epochs=12",
    ]
    read = run("distill", tmp_path / "run", *settings)
    losses = read.series("train/distill_loss").values
    assert len(losses) == 12
    assert np.mean(losses[-3:]) < 0.5 * losses[0]
    assert ("train/teacher_kl" in read.metrics()) == (loss_type == "sampled_reverse_kl")
    assert "train/rl_loss" not in read.metrics()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_given_answers(share: float, teacher: Path, tmp_path: Path) -> None:
    settings = [f"teacher.path={teacher}", "teacher.loss_type=forward_kl", f"on_policy_share={share}", *DISTILL]
    read = run("distill", tmp_path / "run", *settings, "total_train_steps=4", "train_dataset.batch_size=5")
    assert len(read.series("train/distill_loss").values) == 4
    if not share:
        assert "rollout/rewards_mean" not in read.metrics()
        return
    counts = read.series("rollout/num_sequences").values
    assert counts == [2.0, 4.0, 2.0, 4.0]  # two samples for each of 1, 2, 1 and 2 of 5 rows: three in ten of all
    with pytest.raises(DataError, match=r"row 0: field response is missing.*on_policy_share"):
        run("distill", tmp_path / "none", *settings, rows=[{"prompt": "1+1="}] * 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "loss_type", "more"),
    [
        ("distill", "sampled_reverse_kl", ["actor.share_prefixes=on"]),
        ("distill", "jsd", ["actor.share_prefixes=on"]),
        ("gspo", "reverse_kl", ["teacher.prompt_key=solved"]),
    ],
)
def test_rows_choose_their_teacher(recipe: str, loss_type: str, more: list[str], teacher: Path, tmp_path: Path) -> None:
    """Against separate runs of each teacher: a step in which all rows have one teacher is a step of that teacher."""
    settings = [f"teacher.loss_type={loss_type}", *(DISTILL if recipe == "distill" else []), *more]
    settings += ["actor.optimizer.lr=0", "train_dataset.shuffle=false", "total_train_steps=3"]
    adapted = _adapters(tmp_path)
    several = [*settings, f"teacher.models={{trained: {teacher}, adapted: {adapted}}}", "teacher.by=skill", NO_PATH]
    skills = ["trained"] * 8 + ["adapted"] * 8 + ["trained", "adapted"] * 4
    rows = [{**row, "skill": skill} for row, skill in zip([*ROWS, *ROWS], skills, strict=False)]
    name = "train/distill_loss"
    found = run(recipe, tmp_path / "several", *several, rows=rows).series(name).values
    alone = {
        path: run(
            recipe, tmp_path / ("one" if path == teacher else "two"), *settings, f"teacher.path={path}", rows=rows
        )
        .series(name)
        .values
        for path in (teacher, adapted)
    }
    assert found[:2] == [alone[teacher][0], alone[adapted][1]]
    assert abs(alone[teacher][0] - alone[adapted][0]) > 1e-3
    assert min(each[2] for each in alone.values()) < found[2] < max(each[2] for each in alone.values())


def _adapters(folder: Path) -> Path:
    """Adapters of the quickstart's model, with a step of training that leads far away."""
    settings = ["actor.use_lora=true", "actor.optimizer.lr=1e-2", "actor.optimizer.warmup_steps_proportion=0"]
    run("grpo", folder / "a", *settings, "total_train_steps=1", task="quickstart")
    return folder / "a/checkpoints/latest"


@pytest.mark.slow
def test_a_resumed_run_of_several_teachers_is_the_same(teacher: Path, tmp_path: Path) -> None:
    settings = [
        f"teacher.models={{trained: {teacher}, first: null}}",
        "teacher.by=skill",
        NO_PATH,
        "teacher.prompt_key=solved",
    ]
    settings += ["teacher.loss_type=jsd", "recover.mode=auto", "recover.freq_steps=1"]
    settings += [*DISTILL, "actor.optimizer.lr_decay_steps=9", "on_policy_share=0.5"]
    rows = [{**row, "skill": ("trained", "first")[index % 2]} for index, row in enumerate(ROWS)]
    whole = run("distill", tmp_path / "whole", *settings, "total_train_steps=4", rows=rows)
    run("distill", tmp_path / "parts", *settings, "total_train_steps=2", rows=rows)
    parts = run("distill", tmp_path / "parts", *settings, "total_train_steps=4", rows=rows)
    for name in ("train/distill_loss", "train/grad_norm"):
        assert parts.series(name).values == whole.series(name).values


@pytest.mark.slow
def test_a_replay_asks_the_teacher_of_the_sample(teacher: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{**row, "skill": ("trained", "adapted")[index % 2]} for index, row in enumerate(ROWS)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = [*SHORT, *DISTILL, f"train_dataset.path={file}", "train_dataset.loader=null", NO_PATH]
    settings += [f"teacher.models={{trained: {teacher}, adapted: {_adapters(tmp_path)}}}", "teacher.by=skill"]
    settings += ["rollout.dump_to_file=true", "trial_name=run", f"cluster.fileroot={tmp_path}"]
    settings += ["actor.optimizer.lr=1e-2"]  # the checkpoint is far from the base model of the adapters
    assert command.run(get_algorithm("distill"), "distill", settings) == 0
    played = RunReader(tmp_path / "quickstart_distill/run")
    named = [sample["teacher"] for sample in played.samples(1)]
    assert set(named) == {"teacher.trained", "teacher.adapted"}
    recorded = played.path / "rollouts/000002.jsonl"
    recorded.write_text(re.sub(r'"teacher": "teacher\.\w+"', '"teacher": null', recorded.read_text()))
    unnamed = replay(played, 2, 0, device="cpu")
    assert "the teacher, and so the loss: the sample does not name it" in unnamed.missing
    assert unnamed.tokens[-1].teacher is None
    for number in map(named.index, set(named)):
        for token in replay(played, 1, number, checkpoint="latest", device="cpu").tokens[1:]:
            if token.trained:  # the recorded advantage is log(teacher / student)
                assert token.teacher is not None
                assert token.then is not None
                assert token.teacher - token.then == pytest.approx(token.advantage, abs=1e-4)


@pytest.mark.parametrize("as_dataset", [False, True])
def test_unknown_teachers_are_refused_before_models_load(as_dataset: bool, teacher: Path, tmp_path: Path) -> None:
    settings = [*DISTILL, f"teacher.models={{sums: {teacher}, words: {teacher}}}", "teacher.by=skill", NO_PATH]
    for skill, message in (
        ("sum", "is 'sum'; sums or words is expected"),
        (None, "is missing; sums or words is expected"),
        (["sums"], "is ['sums']; sums or words is expected"),
    ):
        rows: Any = [*({**row, "skill": "sums"} for row in ROWS), {**ROWS[0], "skill": skill}]
        if skill == ["sums"]:  # a column of lists
            rows = [{**row, "skill": skill} for row in rows]
        if as_dataset:
            import datasets

            rows = datasets.Dataset.from_list(rows)
        with pytest.raises(DataError, match=rf"row (20|0): field skill {re.escape(message)} \(teacher\.by\)"):
            run("distill", tmp_path / "run", *settings, rows=rows)
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    settings = [*DISTILL, f"teacher.models={{sums: {teacher}, words: {other}}}", "teacher.by=skill", NO_PATH]
    rows = [{**row, "skill": "sums"} for row in ROWS]
    with pytest.raises(ConfigError, match=r"teacher\.models\.words: has 15 rows in its vocabulary"):
        run("distill", tmp_path / "run", *settings, rows=rows)


@pytest.mark.slow
@pytest.mark.slow
def test_the_policy_before_training_may_be_one_of_several_teachers(teacher: Path, tmp_path: Path) -> None:
    """Rows of this teacher alone begin without a loss."""
    rows = [{**row, "skill": "b" if number % 2 else "a"} for number, row in enumerate(ROWS)]
    settings = [*DISTILL, NO_PATH, f"teacher.models={{a: {teacher}, b: null}}", "teacher.by=skill"]
    both = run("distill", tmp_path / "both", *settings, "teacher.loss_type=forward_kl", rows=rows)
    first = [{**row, "skill": "b"} for row in ROWS]
    alone = run("distill", tmp_path / "alone", *settings, "teacher.loss_type=forward_kl", rows=first)
    assert both.series("train/distill_loss").values[0] > 1e-3
    assert alone.series("train/distill_loss").values[0] < 1e-6


def test_a_loss_of_the_user(teacher: Path, tmp_path: Path) -> None:
    """Twice the loss of the recipe has twice its gradient."""
    settings = [*SHORT, *DISTILL, f"teacher.path={teacher}", "teacher.loss_type=reverse_kl", "actor.optimizer.lr=0"]

    def twice(pack: Any, logprobs: Any) -> Any:
        loss = 2 * pack.token_mean(pack.trained(pack.need("divergence")))
        return loss, {"doubled": loss.detach()}

    found = {}
    for loss_fn in (None, twice):
        config = load(get_algorithm("distill").config, "quickstart_distill", settings)
        folder = tmp_path / str(loss_fn and "own")
        with DistillTrainer(config, loss_fn, folder, train_dataset=ROWS) as trainer:
            trainer.fit()
        found[loss_fn] = RunReader(folder)
    for name in ("train/loss", "train/grad_norm"):
        expected = [2 * value for value in found[None].series(name).values]
        assert found[twice].series(name).values == pytest.approx(expected, rel=1e-4)
    assert found[twice].series("train/doubled").values == found[twice].series("train/loss").values
    assert "train/distill_loss" not in found[twice].metrics()
    last = [(each.path / "logs/run.log").read_text().rpartition("done: ")[2] for each in (found[None], found[twice])]
    assert ["; distill_loss " in each for each in last] == [True, False]
    assert "; loss " in last[1]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gspo", "ppo"])
@pytest.mark.parametrize("loss_type", ["sampled_reverse_kl", "reverse_kl"])
def test_a_teacher_beside_rewards(recipe: str, loss_type: str, teacher: Path, tmp_path: Path) -> None:
    settings = [f"teacher.path={teacher}", f"teacher.loss_type={loss_type}", "teacher.distill_loss_weight=0.1"]
    settings += ["critic.warmup_steps=0", "gconfig.n_samples=2"] if recipe == "ppo" else ["teacher.rl_loss_weight=0.5"]
    read = run(recipe, tmp_path / "run", *settings)
    weight = 0.5 if recipe == "gspo" else 1.0
    for loss, rl, distill in zip(
        *(read.series(f"train/{name}").values for name in ("loss", "rl_loss", "distill_loss")), strict=True
    ):
        assert loss == pytest.approx(weight * rl + 0.1 * distill, abs=1e-6)
        assert distill > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sampled_reverse_kl", "reverse_kl"])
@pytest.mark.parametrize("form", ["adapters", "base", "own prompt", "actor"])
def test_kinds_of_teachers(form: str, loss_type: str, tmp_path: Path) -> None:
    settings = [f"teacher.loss_type={loss_type}", *DISTILL]
    adapters = tmp_path / "a/checkpoints/latest"
    if form in ("adapters", "base"):
        run(
            "grpo",
            tmp_path / "a",
            "actor.use_lora=true",
            "actor.optimizer.lr=1e-2",
            "total_train_steps=1",
            "actor.optimizer.warmup_steps_proportion=0",
            task="quickstart",
        )
    if form == "adapters":
        settings += [f"teacher.path={adapters}"]
    else:
        settings += ["teacher.path=null", "actor.optimizer.lr=1e-2"]
    settings += {
        "base": ["actor.use_lora=true", f"actor.init_lora_from={adapters}"],
        "own prompt": ["teacher.prompt_key=solved"],
        "actor": ["teacher.prompt_key=solved", "teacher.follows_actor=true"],
    }.get(form, [])
    losses = run("distill", tmp_path / "run", *settings).series("train/distill_loss").values
    assert all(abs(loss) > 1e-3 for loss in losses)


def test_own_prompts_are_aligned_on_the_response(tmp_path: Path) -> None:
    """The sampled form against the log-probabilities of whole rows that begin with the other prompt."""
    algorithm = get_algorithm("distill")
    config = load(
        algorithm.config, algorithm.default, [*SHORT, *DISTILL, "teacher.path=null", "teacher.prompt_key=solved"]
    )
    seen: list[Any] = []
    with algorithm.trainer(config, tmp_path / "run", train_dataset=ROWS) as trainer:
        train = trainer.setup.trainer.train
        trainer.setup.trainer.train = lambda rows, *args, **how: seen.extend(rows) or train(rows, *args, **how)
        trainer.fit()
        tokenizer = trainer.setup.tokenizer
    plan = plan_of_experiment(config)
    with Engine(plan.spec, plan.workers) as engine:
        for row in seen[:4]:
            n_prompt = list(row.prompt_mask).index(False)
            text = tokenizer.decode(row.tokens[:n_prompt])
            whole = [*tokenizer.encode(f"{text}{eval(text[:-1])} {text}"), *row.tokens[n_prompt:]]
            theirs = engine.logprobs("actor", [whole], config.gconfig)[0]
            n_new = len(row.tokens) - n_prompt
            np.testing.assert_allclose(row.teacher_logprobs[n_prompt:], theirs[-n_new:], atol=1e-4)


@pytest.mark.slow
def test_a_resumed_run_is_the_same(teacher: Path, tmp_path: Path) -> None:
    settings = [
        f"teacher.path={teacher}",
        "teacher.loss_type=jsd",
        "on_policy_share=0.5",
        *DISTILL,
        "recover.mode=auto",
    ]
    settings += ["recover.freq_steps=1", "actor.optimizer.lr_decay_steps=9"]
    whole = run("distill", tmp_path / "whole", *settings, "total_train_steps=4")
    run("distill", tmp_path / "parts", *settings, "total_train_steps=2")
    parts = run("distill", tmp_path / "parts", *settings, "total_train_steps=4")
    for name in ("train/distill_loss", "train/grad_norm"):
        assert parts.series(name).values == whole.series(name).values


def test_a_rejected_token_belongs_to_the_response_of_a_teacher_with_another_prompt() -> None:
    row = TrainSequence(
        tokens=[1, 2, 3, 4, 5],
        prompt_mask=[True, True, False, False, False],
        logprobs=[0.0] * 5,
        teacher_prompt=[7, 8, 9],
    )
    row.response_start = row.for_teacher()[1]
    row.prompt_mask = [True, True, True, False, False]  # token 3 is rejected after the rollout
    facts = SimpleNamespace(vocab_size=10, context_len=8, routes=None)
    [read] = read_training_rows([row], facts, "row {}", with_teacher=True)
    tokens, trained_ = read.for_teacher()
    assert tokens.tolist() == row.for_teacher()[0] == [7, 8, 9, 3, 4, 5]
    assert trained_.tolist() == [False] * 4 + [True] * 2


def test_another_vocabulary_is_refused(teacher: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    text = r"teacher\.path: has 15 rows in its vocabulary .*, and the tokenizer of the actor has the token id 15"
    with pytest.raises(ConfigError, match=text):
        run("distill", tmp_path / "one", f"teacher.path={other}", *DISTILL)
    (other / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    assert isinstance(vocab, dict)
    one, two, *_ = [token for token in vocab if token.isdigit()]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"teacher\.path: has another tokenizer than the actor: '\d' is token"):
        run("distill", tmp_path / "two", f"teacher.path={other}", *DISTILL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["on_policy_share=0.5"], "teacher.loss_type: is sampled_reverse_kl, which needs answers of the student"),
        ([], "teacher.path: names no other model than the student"),
        (["teacher.path=${actor.path}"], "teacher.path: names no other model than the student"),
        (
            ["teacher.path=${actor.path}", "actor.init_from_scratch=true"],
            "teacher.path: is the folder of the actor, which starts with random weights",
        ),
        (["rollout.dynamic_sampling=true"], "rollout.dynamic_sampling: is true, but rewards do not train a student"),
        (["teacher.prompt_key=a", "agent.fn=a.py"], "teacher.prompt_key: is 'a', but a later row of an agent"),
        (["teacher.jsd_beta=0.3"], "teacher.jsd_beta: has no effect with|teacher.jsd_beta: is 0.3, but"),
        (["teacher.follows_actor=true"], "teacher.follows_actor: is true, but teacher.prompt_key is null"),
        (["teacher.follows_actor=true", "teacher.prompt_key=a", "teacher.path=b"], "teacher.path: is b, but"),
        (["teacher.engine_type=train"], "teacher.engine_type: unknown key; the teacher is a model of the run"),
        (["teacher.rl_loss_weight=1"], "teacher.rl_loss_weight: unknown key"),
        (["actor.adv_norm.eps=1"], "actor.adv_norm"),
        (["actor.use_lora=true", "teacher.offload=true"], "teacher.offload: is true, but with actor.use_lora"),
        (["teacher.models={a: b}"], "teacher.by: is null, but models names teachers; set it to"),
        (["teacher.by=a"], "teacher.by: is a, but teacher.models is null"),
        (["teacher.models={a: b}", "teacher.by=c", "teacher.path=d"], "teacher.path: is d, but models names"),
        (["teacher.models={}", "teacher.by=c"], "teacher.models: is empty; name at least one teacher"),
        (["teacher.models={a: ''}", "teacher.by=c"], "teacher.models.a: is ''; a model folder or hub id is expected"),
        (["teacher.models={a: [b]}", "teacher.by=c"], r"teacher.models: \[a\] is \['b'\].*, or null$"),
        (["teacher.models={1a: b}", "teacher.by=c"], "teacher.models: has the name '1a'; a letter and then"),
        (["teacher.models={a: null, b: null}", "teacher.by=d"], "teacher.models.a: names no other model than the stu"),
        (
            ["teacher.path=a", "teacher.prompt_key=b", "teacher.loss_type=jsd", "engine.cp_size=2"],
            "engine.cp_size: is 2, but a teacher with a prompt of its own",
        ),
        (
            ["teacher.models={a: b}", "teacher.by=c", "teacher.follows_actor=true", "teacher.prompt_key=d"],
            "teacher.models: is set, but follows_actor is true",
        ),
        (["valid_dataset=default", "valid_dataset.path=rows"], "valid_dataset: is set, but there is no reward"),
    ],
)
def test_settings_that_contradict(settings: list[str], message: str) -> None:
    given = {"teacher.path": "null"} if not any(word.startswith("teacher.path") for word in settings) else {}
    words = [f"{key}={value}" for key, value in given.items()]
    base = [word for word in (*SHORT, *DISTILL) if not word.startswith("valid_dataset") or "valid" not in message]
    with pytest.raises(ConfigError, match=message):
        load(get_algorithm("distill").config, "quickstart_distill", [*base, *words, *settings], sources=True)


@pytest.mark.slow
def test_a_replay_shows_where_the_teacher_parts(teacher: Path, tmp_path: Path) -> None:
    def played(name: str, *more: str) -> Replay:
        settings = [*SHORT, *DISTILL, f"teacher.path={teacher}", "rollout.dump_to_file=true", f"trial_name={name}"]
        settings += [f"cluster.fileroot={tmp_path}", *more]
        assert command.run(get_algorithm("distill"), "distill", settings) == 0
        return replay(RunReader(tmp_path / "quickstart_distill" / name), 1, 0, device="cpu")

    found = played("sampled")
    for token in found.tokens[1:]:
        assert token.teacher is not None
        if token.trained:  # the recorded advantage is log(teacher / student)
            assert token.then is not None
            assert token.teacher - token.then == pytest.approx(token.advantage, abs=1e-4)
            assert token.gradient == pytest.approx(-(token.advantage or 0.0) / found_trained(found), abs=1e-4)
    assert found.loss is not None
    assert not found.missing
    found = played("whole", "teacher.loss_type=reverse_kl")
    assert found.loss is None
    assert found.missing == ["the loss: that of the teacher is over the whole vocabulary"]
    assert found.tokens[-1].teacher is not None


def found_trained(found: Replay) -> int:
    return sum(token.trained for token in found.tokens)
