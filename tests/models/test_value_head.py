"""Models with a value head against transformers' sequence classification: scores, gradients, folders, ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from areno.config.models import MicroBatchSpec
from areno.errors import CheckpointError
from areno.models.parameters import n_parameters
from areno.models.registry import build_model, head_of, load_config
from areno.models.transformer import Transformer
from areno.models.weights import load_weights
from tests.helpers.family_cases import DENSE, random_model
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import saved_tensors
from tests.helpers.train_backend import train_backend
from tests.helpers.two_ranks import (
    assert_gradients,
    compare_values,
    load,
    on_two_ranks,
    packed,
    random_rows,
    values_of,
)

PAD = 100  # of the 101 tokens


def random_classifier(case: str, folder: Path, num_labels: int = 1, **extra: object) -> transformers.PreTrainedModel:
    return random_model(case, folder, "SequenceClassification", num_labels=num_labels, **extra)


@pytest.mark.parametrize("case", DENSE)
def test_scores_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """At the last token, which is where transformers reads the score of a row without padding; and at the others."""
    reference = random_classifier(case, tmp_path)
    model = load(tmp_path, head="value")
    rows = random_rows(101)
    scores = []
    for row, values in zip(rows, values_of(model, rows), strict=True):
        with torch.no_grad():
            hidden = reference.model(row[None]).last_hidden_state
            torch.testing.assert_close(values, reference.score(hidden)[0, :, 0], atol=1e-4, rtol=0)
            scores.append(reference(row[None]).logits.item())
        assert values.dtype == torch.float32
        assert values[-1].item() == pytest.approx(scores[-1], abs=1e-4)
    assert torch.tensor(scores).std() > 0.1  # they do say something


def test_trailing_pad_tokens_do_not_count_as_in_transformers(tmp_path: Path) -> None:
    """Also where the pad token is part of the row, such as an end-of-sequence token that serves as both."""
    reference = random_classifier("qwen2", tmp_path, pad_token_id=PAD)
    backend = train_backend(load(tmp_path, head="value"), None)
    rows = [[3, 4, 5, 6, 7, 8, 9], [20, 21, 22, 23, 24], [5, 6, 7, PAD], [PAD, 5, PAD, 6, PAD, PAD], [PAD, PAD]]
    padded = torch.full((len(rows), 7), PAD)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(row) for row in rows])
    with torch.no_grad():
        theirs = reference(padded, attention_mask=(torch.arange(7) < lengths[:, None]).long()).logits[:, 0].tolist()
    assert backend.rewards(rows, MicroBatchSpec(mini_bs=16)) == pytest.approx(theirs, abs=1e-4)


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    reference = random_classifier("qwen3-tied", tmp_path)
    model = load(tmp_path, head="value")
    rows = random_rows(101, (5, 9))
    weights = torch.randn(14, generator=torch.Generator().manual_seed(2))
    (model.values(model(*packed(rows))) * weights).sum().backward()
    hidden = torch.cat([reference.model(row[None]).last_hidden_state[0] for row in rows])
    (reference.score(hidden)[:, 0] * weights).sum().backward()
    assert_gradients(model, reference, 2e-4)


def test_bf16_values_are_not_rounded_to_bf16(tmp_path: Path) -> None:
    """Like the log-probabilities: what the critic says of neighbouring states may differ by less than a bf16 step."""
    random_classifier("qwen3", tmp_path)
    model = build_model(load_config(tmp_path, "value"), dtype=torch.bfloat16, device="cpu")
    load_weights(model, tmp_path)
    assert model.score is not None
    hidden = torch.randn(50, 32).bfloat16()
    exact = hidden.double() @ model.score.weight[0].double()
    torch.testing.assert_close(model.values(hidden).double(), exact, atol=1e-5, rtol=1e-5)


# --- folders ---


def assert_transformers_agrees(folder: Path, model: Transformer) -> None:
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert theirs.config.num_labels == 1
    rows = random_rows(101)
    for row, values in zip(rows, values_of(model, rows), strict=True):
        with torch.no_grad():
            assert values[-1].item() == pytest.approx(theirs(row[None]).logits.item(), abs=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", ["qwen3", "llama", "qwen2"])
def test_transformers_loads_what_we_save(case: str, tied: bool, tmp_path: Path) -> None:
    random_classifier(case, tmp_path / "in", tie_word_embeddings=tied)
    model = load(tmp_path / "in", head="value")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    save_weights(model, tmp_path / "out", source=tmp_path / "in")
    assert_transformers_agrees(tmp_path / "out", model)
    again = load(tmp_path / "out", head="value")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("case", DENSE)
def test_a_critic_starts_from_the_body_of_a_language_model(case: str, tmp_path: Path) -> None:
    reference = random_model(case, tmp_path / "lm")
    model = load(tmp_path / "lm", head="value")
    rows = random_rows(101)
    with torch.no_grad():
        hidden = model(*packed(rows))
        expected = torch.cat([reference.model(row[None]).last_hidden_state[0] for row in rows])
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
    assert all(values.eq(0).all() for values in values_of(model, rows))
    assert model.score is not None
    torch.nn.init.normal_(model.score.weight)
    save_weights(model, tmp_path / "critic")
    assert_transformers_agrees(tmp_path / "critic", model)
    config = json.loads((tmp_path / "critic/config.json").read_text())
    assert config["architectures"] == [reference.config.architectures[0].replace("CausalLM", "SequenceClassification")]
    assert load_config(tmp_path / "critic", "value", needs_head=True).has_head


def test_random_weights_leave_the_head_at_0(tmp_path: Path) -> None:
    """And the body is that of the language model with the same seed: a critic of an actor without weight files."""
    random_model("qwen3", tmp_path)
    actor = build_model(load_config(tmp_path), dtype=torch.float32, device="cpu")
    critic = build_model(load_config(tmp_path, "value"), dtype=torch.float32, device="cpu")
    for model in (actor, critic):
        model.init_weights(seed=5)
    theirs = dict(actor.named_parameters())
    for name, parameter in critic.named_parameters():
        assert torch.equal(parameter, torch.zeros(1, 32) if name == "score.weight" else theirs[name]), name


def test_tensors_of_a_classifier(tmp_path: Path) -> None:
    random_classifier("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(101, 32)}, tmp_path / "model.safetensors")
    assert load(tmp_path, head="value").score is not None  # some reward models still carry the vocabulary head
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the weights lack score\.weight"):
        load(tmp_path, head="value")


@pytest.mark.parametrize("num_labels", [2, 3])
def test_several_labels_are_refused(num_labels: int, tmp_path: Path) -> None:
    random_classifier("llama", tmp_path, num_labels)
    with pytest.raises(CheckpointError, match=rf"has {num_labels} labels .*expected 1.*actor\.path"):
        load_config(tmp_path, "value")


def test_a_head_that_is_not_there(tmp_path: Path) -> None:
    random_classifier("qwen2", tmp_path / "classifier")
    with pytest.raises(CheckpointError, match=r"Qwen2ForSequenceClassification.*no next token.*ForCausalLM"):
        load_config(tmp_path / "classifier")
    random_model("qwen2", tmp_path / "lm")
    with pytest.raises(CheckpointError, match=r"Qwen2ForCausalLM.*no trained value head.*ForSequenceClassification"):
        load_config(tmp_path / "lm", "value", needs_head=True)
    assert not load_config(tmp_path / "lm", "value").has_head


# --- two labels for each token ---


def random_steps(case: str, folder: Path, num_labels: int = 2) -> transformers.PreTrainedModel:
    """A token classifier of transformers, whose head has biases."""
    return random_model(case, folder, "TokenClassification", num_labels=num_labels)


@pytest.mark.parametrize("case", DENSE)
def test_log_odds_of_labels_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Their values and gradients, and those of what is saved."""
    reference, rows = random_steps(case, tmp_path / "in"), random_rows(101, (5, 9))
    model = load(tmp_path / "in", head="step")
    weights = torch.randn(14, generator=torch.Generator().manual_seed(2))
    values = model.values(model(*packed(rows)))
    (values * weights).sum().backward()
    logits = torch.cat([reference(row[None]).logits[0] for row in rows])
    expected = logits[:, 1] - logits[:, 0]
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1
    (expected * weights).sum().backward()
    assert {"score.weight", "score.bias"} <= set(assert_gradients(model, reference, 2e-4))
    save_weights(model, tmp_path / "out", source=tmp_path / "in")
    saved = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        again = torch.cat([saved(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(again, logits.detach(), atol=1e-5, rtol=0)


def test_a_token_classifier_starts_from_a_language_model(tmp_path: Path) -> None:
    random_model("qwen3", tmp_path / "lm")
    model = load(tmp_path / "lm", head="step")
    assert all(values.eq(0).all() for values in values_of(model, random_rows(101)))
    assert model.score is not None
    with torch.no_grad():
        model.score.weight.normal_()
        model.score.bias.copy_(torch.tensor([0.5, -1.0]))
    save_weights(model, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    saved, report = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    row = random_rows(101)[0]
    with torch.no_grad():
        logits = saved.eval()(row[None]).logits[0]
    torch.testing.assert_close(values_of(model, [row])[0], logits[:, 1] - logits[:, 0], atol=1e-4, rtol=0)
    fresh = build_model(load_config(tmp_path / "lm", "step"), dtype=torch.float32, device="cpu")
    fresh.init_weights(seed=5)
    assert fresh.score is not None
    assert all(parameter.eq(0).all() for parameter in fresh.score.parameters())


def test_heads_that_are_no_token_classifiers(tmp_path: Path) -> None:
    random_classifier("qwen2", tmp_path / "value")
    random_steps("qwen2", tmp_path / "three", 3)
    random_steps("qwen2", tmp_path / "step")
    random_model("qwen2", tmp_path / "lm")
    random_model("gemma3", tmp_path / "gemma")
    for folder, head, message in (
        ("value", "step", r"Qwen2ForSequenceClassification.*no trained head for steps.*Qwen2ForTokenClassification"),
        (
            "step",
            "value",
            r"Qwen2ForTokenClassification.*no trained value head; expected a reward model in",
        ),
        ("step", "lm", r"Qwen2ForTokenClassification.*no next token"),
        ("three", "step", "has 3 labels .*expected 2; a step is wrong or right"),
        ("gemma", "step", "no ...ForTokenClassification for the model type 'gemma3_text'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_config(tmp_path / folder, head)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"Qwen2ForCausalLM.*no trained head for steps"):
        load_config(tmp_path / "lm", "step", needs_head=True)
    assert head_of(tmp_path / "step") == "step"
    assert n_parameters(load_config(tmp_path / "step", "step")) == sum(
        parameter.numel() for parameter in load(tmp_path / "step", head="step").parameters()
    )


# --- tensor parallelism ---


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    reference = random_classifier("qwen3", tmp_path / "model")
    on_two_ranks(compare_values, tmp_path / "model")
    saved = saved_tensors(tmp_path / "model-saved")
    assert saved.keys() == reference.state_dict().keys()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(saved[name], tensor), name
