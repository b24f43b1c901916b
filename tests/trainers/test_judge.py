"""A judge in runs: a model of the run, whose scores are those of transformers, and an endpoint."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from areno.api import get_algorithm
from areno.api.trainer import Trainer
from areno.cli.__main__ import main
from areno.config.judge import JudgeConfig
from areno.errors import ArenoError, CheckpointError, ConfigError, DataError
from areno.files.interrupts import InterruptDelay
from areno.launch.compose import load
from areno.plan.forecast import forecast
from areno.plan.hardware import hardware_of, local_cpu
from areno.plan.roles import experiment_roles
from areno.scoring.judge import Judging
from areno.scoring.judge_readers import EndpointJudge
from tests.helpers.agent_runs import DATA
from tests.helpers.agent_runs import run as agent_run
from tests.helpers.endpoints import endpoint
from tests.helpers.policy_runs import MODEL, classifier, other_actor, play
from tests.helpers.recipe_runs import ROOT, command
from tests.helpers.served import Served

LABELS = "[1,2,3]"
STORIES = ROOT.parent / "shared/data/models/stories260K-hf"


def role(folder: Path, *words: str) -> list[str]:
    """Settings with a judge that is the quickstart's model with other weights."""
    return ["reward.fn=null", f"reward.judge.path={folder}", *words]


def test_a_model_that_is_no_judge_is_named_by_its_setting(tmp_path):
    scores = classifier(tmp_path / "judge")
    for file in MODEL.glob("tokenizer*"):
        (scores / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"expected a causal language model .* in reward\.judge\.path$"):
        play("grpo", tmp_path / "run", *role(scores, "reward.judge.rubric=correct"))


def test_a_question_names_fields_that_rows_have(tmp_path):
    words = ["reward.judge.template='{prompt} {completion} {topic}'", f"reward.judge.labels={LABELS}"]
    with pytest.raises(DataError, match="a row has no field topic, which the question of the judge names"):
        play("grpo", tmp_path / "run", *role(MODEL, *words))
    assert not (tmp_path / "run").exists()  # before a model is loaded


@pytest.mark.slow
def test_scores_of_a_role_are_the_expected_labels_under_transformers(tmp_path):
    judge = other_actor(tmp_path / "judge", 0.3)
    template = "{prompt}{completion}="
    words = [f"reward.judge.template='{template}'", f"reward.judge.labels={LABELS}", "reward.judge.weight=2.0"]
    played = play("grpo", tmp_path / "run", *role(judge, *words))
    model = transformers.AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    labels = [tokenizer.encode(label, add_special_tokens=False)[0] for label in "123"]
    samples = played.samples(1)
    assert len(samples) == 16
    seen = set()
    for sample in samples:
        text = template.format(prompt=sample["prompt"], completion=sample["completion"])
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            probabilities = model(tokens).logits[0, -1].double().softmax(-1)[labels]
        if any(map(str.isalnum, sample["completion"])):
            score = float(probabilities @ torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64) / probabilities.sum())
            assert sample["parts"]["judge/label_mass"] == pytest.approx(float(probabilities.sum()), abs=1e-5)
        else:
            score = 0.0
        assert sample["parts"]["judge"] == pytest.approx(score, abs=1e-5)
        assert sample["reward"] == pytest.approx(2 * score, abs=1e-5)
        seen.add(round(score, 4))
    assert len(seen) > 3
    names = played.names()
    assert {"rollout/reward/judge", "rollout/reward/judge/label_mass"} <= names
    assert played.series("rollout/reward/judge")[0] == pytest.approx(
        sum(sample["parts"]["judge"] for sample in samples) / 16
    )


@pytest.mark.parametrize("words", [["reward.judge.offload=true"], ["enable_offload=true"], []])
def test_the_judge_is_one_more_frozen_role_of_the_plan(words):
    config = load(get_algorithm("grpo").config, "quickstart", role(MODEL, *words))
    spec = experiment_roles(config)["judge"]
    assert (spec.key, spec.head, spec.optimizer) == ("reward.judge.path", "lm", None)
    assert spec.offload == bool(words)
    found = forecast(config, local_cpu(), 1)
    assert [model.own_section for model in found.footprint.models] == ["actor", "reward.judge"]
    assert "score judge" in [phase.name for phase in found.phases]


@pytest.mark.parametrize(
    ("words", "n_questions", "n_labels", "n_answers"),
    [
        (["reward.judge.rubric=quality"], 4, 5, 1),
        (["reward.judge.compare=true", "valid_dataset=null"], 4 * 3, 2, 2),
        (["reward.judge.compare=true", "valid_dataset=null", "reward.judge.opponents=1"], 4 * 2, 2, 2),
    ],
)
def test_the_forecast_counts_questions_with_their_answers_and_labels(words, n_questions, n_labels, n_answers):
    words = [*role(MODEL, *words), "gconfig.n_samples=4", "train_dataset.batch_size=8"]
    config = load(get_algorithm("grpo").config, "quickstart", words)
    found = forecast(config, local_cpu(), 1)
    [phase] = [phase for phase in found.phases if phase.name == "score judge"]
    question = len(config.reward.judge.question_template) // 4 + found.lengths.prompt + n_answers * found.lengths.answer
    assert phase.n_tokens == 8 * n_questions * n_labels * (question + 1)


@pytest.mark.parametrize("compares", [False, True])
def test_the_forecast_counts_the_replies_of_a_judge_and_the_cache_for_them(compares):
    words = ["gconfig.n_samples=4", "train_dataset.batch_size=8", "valid_dataset=null", "reward.judge.max_tokens=200"]
    words += ["reward.judge.compare=true"] if compares else ["reward.judge.rubric=quality"]
    how = {"labels": ["reward.judge.max_tokens=1024"], "json": ["reward.judge.verdict=json"]}
    by = {}
    for verdict, more in how.items():
        config = load(get_algorithm("grpo").config, "quickstart", [*role(MODEL), *words, *more])
        by[verdict] = forecast(config, hardware_of("h200"), 1)
    labels, written = ({phase.name: phase for phase in found.phases} for found in by.values())
    assert labels.keys() - written.keys() == {"score judge"}
    assert list(written) == ["rollout", "write judge", "train actor"]
    lengths = by["json"].lengths
    question = len(config.reward.judge.question_template) // 4 + lengths.prompt + (1 + compares) * lengths.answer
    n_replies = 8 * (12 if compares else 4)
    found = written["write judge"]
    assert (found.n_tokens, found.clock) == (n_replies * 200, "reward")
    shape = json.loads((MODEL / "config.json").read_text())
    kv_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    least = n_replies * min(question + 200, shape["max_position_embeddings"]) * kv_bytes
    own = found.terms["KV cache"] - written["train actor"].terms["KV cache"]
    assert least < own < 1.5 * least + 16384 * kv_bytes  # with room for a chunk of a prefill, and parts of blocks
    # A decode step takes at least the launches of its layers; 2 s are for the decoder that is made anew.
    assert found.seconds > 2 + 200 * shape["num_hidden_layers"] * 30e-6 > labels["score judge"].seconds
    config.rollout.drop_rollout_state = True
    [dropped] = [phase for phase in forecast(config, hardware_of("h200"), 1).phases if phase.name == found.name]
    assert dropped.terms["KV cache"] == own


def test_a_plan_says_that_the_replies_of_a_judge_find_no_room():
    """The cache of the actor leaves too little memory for that of the judge; or both are set too small for a reply."""
    words = ["actor.path=Qwen/Qwen3-0.6B", "gconfig.max_new_tokens=256", "valid_dataset=null", *role("Qwen/Qwen3-8B")]
    words += ["reward.judge.verdict=json", "reward.judge.max_tokens=3000", "train_dataset.batch_size=512"]

    def planned(*more, gib=50):
        config = load(get_algorithm("grpo").config, "quickstart", [*words, *more])
        return forecast(config, replace(hardware_of("h100-80gb"), memory=gib * 2**30), 1, 256, 256)

    assert planned().problems[0].startswith("write judge needs ")
    for changes in ("rollout.drop_rollout_state=true", "actor.offload=true"):
        assert planned(changes).problems == []
    assert planned(gib=80).problems == []
    found = planned("rollout.max_kv_tokens=1024", gib=80)
    assert re.match(
        r"the KV cache of the judge has room for 1,0.. tokens, and a sample may need 3,...$", found.problems[0]
    )


def test_a_signal_waits_for_the_pass_of_the_judge_and_interrupts_the_wait_for_an_endpoint(tmp_path, monkeypatch):
    """An interrupted pass would leave the devices of a run waiting for each other."""
    seen, is_inside = [], [False]
    score, wait, interruptible = Trainer.score_logprobs, Judging.collect_outcomes, InterruptDelay.interruptible

    def spied_score(self, name, *args, **kwargs):
        seen.append((name, is_inside[0]))
        return score(self, name, *args, **kwargs)

    def spied_wait(self):
        seen.append(("wait", is_inside[0]))
        return wait(self)

    @contextlib.contextmanager
    def spied_interruptible(self):
        with interruptible(self):
            is_inside[0] = True
            yield
        is_inside[0] = False

    monkeypatch.setattr(InterruptDelay, "interruptible", spied_interruptible)
    monkeypatch.setattr(Trainer, "score_logprobs", spied_score)
    monkeypatch.setattr(Judging, "collect_outcomes", spied_wait)
    words = [f"reward.judge.labels={LABELS}", "reward.judge.template='{prompt}{completion}='", "total_train_steps=1"]
    play("grpo", tmp_path / "run", *role(MODEL, *words))
    assert seen == [("judge", False), ("wait", True)]


def test_parts_beside_a_judge_have_the_names_of_their_sources(tmp_path):
    words = [f"reward.judge.labels={LABELS}", "reward.judge.template='{prompt}{completion}='", "total_train_steps=1"]
    words.append(f"reward.path={classifier(tmp_path / 'reward')}")
    for sample in play("grpo", tmp_path / "run", *role(MODEL, *words)).samples(1):
        assert {"model", "judge"} <= sample["parts"].keys()
        assert "fn" not in sample["parts"]
        assert sample["reward"] == pytest.approx(sample["parts"]["model"] + sample["parts"]["judge"])


@pytest.mark.slow
def test_an_agent_is_judged_under_the_prompt_of_its_row(tmp_path):
    """Not under the turns of the trajectory, which hold replies of tools and of the agent."""
    with endpoint(lambda _: "yes") as (url, requests):
        words = [f"reward.judge.base_url={url}", "reward.judge.model=m", "total_train_steps=1"]
        words.append("reward.judge.refuse_blank=false")
        words.append("reward.judge.template='<<{prompt}>>{completion}'")
        agent_run(tmp_path / "run", "two_turns.py", *words)
    asked = {request["messages"][0]["content"].rpartition(">>")[0] for request in requests[1:]}
    assert asked <= {f"<<{row['prompt']}" for row in DATA}
    assert len(asked) > 1


def test_a_judge_without_a_tokenizer_is_named(tmp_path):
    judge = other_actor(tmp_path / "judge", 0.3)
    for file in judge.glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"reward.judge.path: no tokenizer can be loaded from"):
        play("grpo", tmp_path / "run", *role(judge))


def test_a_judge_that_cannot_write_is_named_with_other_problems(tmp_path):
    """The vocabulary of the quickstart's model has no letters."""
    words = ["reward.judge.verdict=json", "train_dataset.path=no_such_file.jsonl", "train_dataset.loader=null"]
    words += ["reward.path=no/such-folder"]
    with pytest.raises(ConfigError) as found:
        play("grpo", tmp_path / "run", *role(MODEL, *words))
    assert {"reward.judge.path", "train_dataset.path"} <= {problem.key for problem in found.value.problems}
    assert "tokenizer cannot write" in str(found.value)
    assert str(found.value).count("no/such-folder is not a local folder") == 1


def test_a_judge_that_is_nowhere_is_named_once(tmp_path):
    with pytest.raises(ArenoError) as found:
        play("grpo", tmp_path / "run", *role(Path("no/such-folder")))
    assert str(found.value).count("no/such-folder is not a local folder") == 1


@pytest.mark.parametrize(("words", "part"), [(["gconfig.n_samples=1"], "rollout"), ([], "evaluation")])
def test_a_single_sample_is_compared_with_nothing(words, part):
    words = [*role(MODEL, *words), "reward.judge.compare=true", "reward.judge.template='{first}{second}'"]
    with pytest.raises(ConfigError, match=rf"reward.judge.compare: is true, but the {part} \(.*\) has one sample"):
        load(get_algorithm("grpo").config, "quickstart", words)


def test_labels_of_the_same_token_are_refused(tmp_path):
    words = ["reward.judge.compare=true", "reward.judge.template='{prompt}{first}+{second}='"]
    judge = other_actor(tmp_path / "judge", 0.3)
    with pytest.raises(ConfigError, match=r"reward.judge.labels: has labels that do not differ in their first token"):
        play("grpo", tmp_path / "refused", *role(judge, *words))


@pytest.mark.parametrize(
    "words", [["reward.judge.concurrency=2"], ["reward.judge.base_url=http://h", "reward.judge.model=m"]]
)
def test_a_role_takes_no_settings_of_endpoints(words, tmp_path):
    with pytest.raises(ConfigError, match=r"reward.judge.(concurrency|path): is "):
        play("grpo", tmp_path / "run", *role(MODEL, *words))


@pytest.mark.slow
def test_a_judge_that_is_the_actor_compares_its_samples_with_shared_prefixes_and_resumes(tmp_path):
    """Training moves the actor, and not the judge; the second process of the run judges as the first did."""
    conversations = ["reward.judge.compare=true", "reward.judge.template='{prompt}{first}+{second}='"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areno.config.judge.CHOICES", ("1", "2"))  # the vocabulary has no letters
        whole = play("grpo", tmp_path / "whole", *role(MODEL, *conversations, "total_train_steps=3"))
        for steps in (2, 3):
            words = [f"total_train_steps={steps}", "recover.freq_steps=1"]
            parts = play("grpo", tmp_path / "parts", *role(MODEL, *conversations, *words))
    for step in (1, 2, 3):
        scores = [[sample["parts"]["judge"] for sample in run.samples(step)] for run in (whole, parts)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-6)
        assert sum(scores[0]) == pytest.approx(8.0)  # each comparison gives a point to both answers together
    assert 0 <= whole.series("rollout/reward/judge/disagreement")[0] <= 1
    assert 0 < whole.series("rollout/reward/judge/first")[0] < 1


@pytest.mark.slow
def test_an_evaluation_keeps_the_judge(tmp_path, capsys):
    words = [f"reward.judge.labels={LABELS}", "reward.judge.template='{prompt}{completion}='"]
    words = [*role(MODEL, *words), "total_train_steps=1", "valid_dataset=null", "trial_name=t"]
    command("grpo", tmp_path, *words)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "12+34="}\n{"prompt": "1+1="}\n', encoding="utf-8")
    assert main(["evaluate", str(tmp_path / "outputs/quickstart/t"), "--data", str(rows), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["reward/judge"] < 1
    assert found["rewards_mean"] == pytest.approx(found["reward/judge"])


@pytest.mark.slow
def test_the_same_model_judges_alike_as_a_role_and_at_the_projects_own_server(tmp_path, monkeypatch):
    judge = other_actor(tmp_path / "judge", 0.3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(judge)
    monkeypatch.setattr("areno.scoring.judge_readers._TOP", (16,))  # all tokens of the vocabulary
    monkeypatch.setattr("areno.scoring.judge_readers._LEAST_MASS", 0.0)
    words = [f"reward.judge.labels={LABELS}", "reward.judge.template='{prompt}{completion}='", "total_train_steps=1"]
    inside = play("grpo", tmp_path / "inside", *role(judge, *words)).samples(1)
    with contextlib.closing(Served(folder=str(judge))) as server:
        words += ["reward.fn=null", f"reward.judge.base_url={server.url}", "reward.judge.model=judge"]
        outside = play("grpo", tmp_path / "outside", *words).samples(1)
    assert [sample["completion"] for sample in inside] == [sample["completion"] for sample in outside]
    scores = [[sample["parts"]["judge"] for sample in samples] for samples in (inside, outside)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert all(sample["parts"].get("judge/unreadable", 0.0) == 0.0 for sample in outside)


@pytest.mark.slow
def test_the_projects_own_server_writes_json_of_the_schema(caplog):
    """A model of random weights reasons for as long as it may."""
    with contextlib.closing(Served()) as server:
        config = JudgeConfig(base_url=server.url, model="tiny", verdict="json", max_tokens=60, enable_thinking=False)
        with EndpointJudge(config) as reader:
            verdict = reader.ask("Is it?").result()
    assert "refuses" not in caplog.text
    assert verdict.probabilities or "'{" in verdict.message


@pytest.mark.slow
def test_a_policy_learns_what_its_judge_likes(tmp_path):
    """The judge continues a sum of three numbers, and likes answers after which it would write a large digit."""
    words = [f"reward.judge.labels={LABELS}", "reward.judge.template='{prompt}{completion}='", "total_train_steps=30"]
    words += ["train_dataset.batch_size=16", "gconfig.n_samples=8", "gconfig.temperature=1.0"]
    means = play("grpo", tmp_path / "run", *role(MODEL, *words)).series("rollout/rewards_mean")
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.1


@pytest.mark.skipif(not STORIES.exists(), reason="the model is not there")
def test_a_judge_of_another_family_reads_by_its_own_tokenizer(tmp_path):
    template = "The answer to {prompt} is {completion}. This is"
    words = ["reward.judge.labels=[bad,good]", f"reward.judge.template='{template}'", "total_train_steps=1"]
    samples = play("grpo", tmp_path / "run", *role(STORIES, *words)).samples(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(STORIES)
    labels = [tokenizer.encode(label, add_special_tokens=False)[0] for label in ("bad", "good")]
    for sample in samples:
        text = template.format(**sample)  # which the chat template leaves as it is
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(tokens).logits[0, -1].double()[labels]
        assert sample["parts"]["judge"] == pytest.approx(float(logits.softmax(-1)[1]), abs=1e-5)
