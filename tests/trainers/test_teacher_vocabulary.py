"""Teachers whose vocabulary is not that of the student, but whose tokens have the same ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areno.api import get_algorithm
from areno.launch.compose import load
from areno.plan.plan import plan_of_experiment
from areno.plan.vocabularies import complete_roles
from areno.specs.role import RoleSpec
from areno.tracking.reader import RunReader

MODEL = Path(__file__).parents[2] / "examples/quickstart/model"
ROWS = [{"prompt": f"{a}+9=", "solutions": str(a + 9)} for a in range(11, 31)]


def test_tokens_of_both_models_are_common(tmp_path: Path) -> None:
    plan = plan_of_experiment(load(get_algorithm("distill").config, "quickstart_distill", ["engine.device=cpu"]))
    folder = Path(plan.spec.actor.path)
    own = plan.tokenizer.get_vocab()

    def common(name: str, size: int, drop: tuple[int, ...] = (), add: int = 0) -> tuple[tuple[int, int], ...]:
        other = tmp_path / name
        shutil.copytree(folder, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
        tokenizer = json.loads((other / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        kept = {token: number for token, number in vocab.items() if number not in drop}
        tokenizer["model"]["vocab"] = kept | {f"new{at}": len(own) + at for at in range(add)}
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
        role = RoleSpec(path=str(other), key="teacher.path")
        return complete_roles({"teacher": role, "ref": role}, plan)["teacher"].common_ids

    n = len(own)
    assert common("same", n) == ()
    assert common("larger", n + 5) == ((0, n),)
    assert common("more tokens", n + 3, add=2) == ((0, n),)
    digit = own["7"]
    assert common("fewer tokens", n, drop=(digit,)) == ((0, digit), (digit + 1, n))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["reverse_kl", "sampled_reverse_kl"])
def test_more_rows_than_tokens_change_nothing(loss_type: str, tmp_path: Path) -> None:
    losses = []
    for name, n_more in (("same", 0), ("larger", 6)):
        teacher = tmp_path / name
        shutil.copytree(MODEL, teacher)
        config = json.loads((teacher / "config.json").read_text())
        (teacher / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + n_more}))
        noise = torch.Generator().manual_seed(0)
        tensors = {
            key: tensor + 0.02 * torch.randn(tensor.shape, generator=noise)
            for key, tensor in sorted(load_file(teacher / "model.safetensors").items())
        }
        for key in {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors):
            tensors[key] = torch.nn.functional.pad(tensors[key], (0, 0, 0, n_more), value=1.0)
        save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
        settings = ["total_train_steps=2", "train_dataset.batch_size=8", "gconfig.n_samples=2", "valid_dataset=null"]
        settings += ["engine.device=cpu", "saver.freq_steps=null", "reward.fn=null", f"teacher.path={teacher}"]
        algorithm = get_algorithm("distill")
        config = load(algorithm.config, "quickstart_distill", [*settings, f"teacher.loss_type={loss_type}"])
        with algorithm.trainer(config, tmp_path / f"run {name}", train_dataset=ROWS) as trainer:
            trainer.fit()
        losses.append(RunReader(tmp_path / f"run {name}").metrics()["train/loss"].values)
    assert abs(losses[0][0]) > 1e-3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
