"""Models on two ranks against one. Without transformers, whose import would take each rank seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from areno.layers.attention import PackedAttend
from areno.layers.parallel import ParallelGroup
from areno.layers.rotary import permute_heads
from areno.models.config import HeadName
from areno.models.registry import build_model, load_config
from areno.models.transformer import Transformer
from areno.models.weights import load_weights, stored_tensors
from tests.helpers import warm
from tests.helpers.saving import save_weights

if TYPE_CHECKING:
    import transformers


def load(folder: Path, tp: ParallelGroup | None = None, head: HeadName = "lm") -> Transformer:
    model = build_model(load_config(folder, head), dtype=torch.float32, device="cpu", tp=tp)
    load_weights(model, folder)
    return model


def packed(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, PackedAttend]:
    """Tokens and positions end to end, and the attention that keeps the rows apart."""
    lengths = [len(row) for row in rows]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return torch.cat(rows), positions, PackedAttend(cu_seqlens, max(lengths), "sdpa")


def random_rows(vocab: int, lengths: tuple[int, ...] = (7, 60, 1, 7, 33)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (n,), generator=generator) for n in lengths]


def values_of(model: Transformer, rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The head's output at every token of every row."""
    with torch.no_grad():
        return model.values(model(*packed(rows))).split([len(row) for row in rows])


def gradient_of(name: str, theirs: dict[str, torch.nn.Parameter]) -> torch.Tensor | None:
    """Of a checkpoint tensor; transformers stacks the experts of a layer in one parameter."""
    if ".experts." not in name or name in theirs:
        return theirs[name.replace("block_sparse_moe", "mlp")].grad
    for ours, name_of_both in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        name = name.replace("block_sparse_moe", "mlp").replace(ours, name_of_both)
    layer, _, rest = name.partition(".experts.")
    expert, kind, _ = rest.split(".")
    if kind == "down_proj":
        return theirs[f"{layer}.experts.down_proj"].grad[int(expert)]
    return theirs[f"{layer}.experts.gate_up_proj"].grad[int(expert)].chunk(2)[kind == "up_proj"]


def gradients_apart(model: Transformer, reference: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """For each checkpoint tensor, the largest difference of its gradients, and the largest gradient of transformers."""
    theirs, found = dict(reference.named_parameters()), {}
    for name, stored in stored_tensors(model).items():
        entry, (order, *_) = stored.entries[0], stored.orders
        assert len(stored.entries) == 1 or stored.n_experts  # these families fuse no other tensors
        if name.endswith("e_score_correction_bias"):  # never trained
            assert entry.parameter.grad is None
            continue
        assert entry.parameter.grad is not None, name
        expected = gradient_of(name, theirs)
        assert expected is not None, name
        ordered = expected if order is None else permute_heads(expected, order)
        gradients = torch.cat([each.part.region(each.parameter.grad) for each in stored.entries])  # type: ignore[arg-type]
        ours = stored.in_file_order(gradients).view(ordered.shape)
        found[name] = tuple(each.abs().max().item() for each in (ours - ordered, ordered))
    return found


def assert_gradients(model: Transformer, reference: torch.nn.Module, absolute: float) -> list[str]:
    """Our gradients are those of transformers. Returns the names of the checkpoint tensors that were compared."""
    found = gradients_apart(model, reference)
    for name, (difference, largest) in found.items():
        assert difference <= absolute + 1e-4 * largest, name
    return [*found]


def on_two_ranks(check: Callable[[Path, ParallelGroup], None], *folders: Path) -> None:
    """Call check(folder, tp) for each folder in two processes."""
    warm.on_ranks(_rank_main, (check, folders), 2)


def _rank_main(rank: int, check: Callable[[Path, ParallelGroup], None], folders: tuple[Path, ...]) -> None:
    torch.set_num_threads(1)
    meeting = folders[0].with_name("rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for folder in folders:
        check(folder, ParallelGroup(rank=rank, size=2, group=dist.group.WORLD))
    dist.destroy_process_group()


def assert_saved_alike(reference: transformers.PreTrainedModel, folder: Path) -> None:
    """transformers reads from the folder the very weights of the reference."""
    import transformers

    saved = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in reference.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], parameter, atol=0, rtol=0, msg=f"{folder}: {name}")


def compare_models(folder: Path, tp: ParallelGroup) -> None:
    """Logits, gradients (after gathering), initialisation; saves the model beside its folder."""
    alone, model = load(folder), load(folder, tp)
    padded = torch.cat([alone.lm_head.weight, torch.zeros(1, 32)])
    assert torch.equal(model.lm_head.weight, padded[tp.rank * 51 : (tp.rank + 1) * 51])
    inputs = packed(random_rows(101, (5, 9)))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(*inputs)), alone.logits(alone(*inputs)), atol=1e-4, rtol=0)
    weights = torch.randn(14, 32, generator=torch.Generator().manual_seed(2))
    for one in (alone, model):
        (one(*inputs) * weights).sum().backward()
    expected = dict(alone.named_parameters())
    for own, parameter in model.named_parameters():
        if parameter.grad is None:
            continue  # an untied head, which the hidden states do not reach
        assert model.is_sharded(own) == (parameter.shape != expected[own].shape)
        for part, whole in zip(model.tensor_parts(own), alone.tensor_parts(own), strict=True):
            full = torch.empty(part.full_shape)
            for owner in range(tp.size):
                part.gather(parameter.grad, tp, owner, full if tp.rank == owner else None)
            wanted = whole.region(expected[own].grad)
            # See test_families.py: recurrent states have gradients of hundreds, and rounding grows with them.
            scale = max(1.0, wanted.abs().max().item() / 4) if model.config.delta else 1.0
            torch.testing.assert_close(full, wanted, atol=1e-4 * scale, rtol=1e-4, msg=f"{folder.name} {own}")
    save_weights(model, f"{folder}-saved")
    for one in (alone, model):
        one.init_weights(seed=5)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(*inputs)), alone.logits(alone(*inputs)), atol=1e-4, rtol=0)


def compare_values(folder: Path, tp: ParallelGroup) -> None:
    """Values and gradients of models with a value head; saves the model beside its folder."""
    alone, model = load(folder, head="value"), load(folder, tp, "value")
    rows = random_rows(101, (5, 9))
    weights = torch.randn(14, generator=torch.Generator().manual_seed(2))
    for one in (alone, model):
        (one.values(one(*packed(rows))) * weights).sum().backward()
    torch.testing.assert_close(values_of(model, rows), values_of(alone, rows), atol=1e-4, rtol=0)
    expected = dict(alone.named_parameters())
    assert not model.is_sharded("score.weight")
    for own, parameter in model.named_parameters():
        assert parameter.grad is not None
        for part, whole in zip(model.tensor_parts(own), alone.tensor_parts(own), strict=True):
            full = torch.empty(part.full_shape)
            for owner in range(tp.size):
                part.gather(parameter.grad, tp, owner, full if tp.rank == owner else None)
            torch.testing.assert_close(full, whole.region(expected[own].grad), atol=1e-4, rtol=1e-4, msg=own)
    save_weights(model, f"{folder}-saved")
