"""A model as transformers computes it, in float64 with eager attention, one row at a time and without padding."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from areno.config.experiments import HeadName

Weights = Mapping[str, Tensor]
"""Parameters by name in float64. With adapters, those of the adapters, by their names in peft."""

_ADAPTERS, _PEFT = "adapter_config.json", "base_model.model."


class TransformersModel:
    """The shape of a model, to be computed with any weights of this shape.

    Args:
        folder: The model, or the base model of adapters.
        head: Its head, as the run uses it. A value head is the model's output for one label, a step head the difference
            of two labels.
        adapters: A folder of peft whose settings the adapters have. None: the weights are those of the whole model.
    """

    def __init__(self, folder: Path, head: HeadName = "lm", adapters: Path | None = None):
        self.head: HeadName = head
        self._model = _load(folder, head).double().eval().requires_grad_(False)
        self._model.get_input_embeddings().padding_idx = None  # else its token has no gradient, also where it is text
        self._scale = None if adapters is None else _adapter_scale(adapters)
        self._base = dict(self._model.named_parameters())

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Read weights of this shape in float32, or the gradient of these weights in the same form."""
        if (folder / _ADAPTERS).is_file():
            found = load_file(folder / "adapter_model.safetensors")
            return {name.removeprefix(_PEFT): tensor for name, tensor in sorted(found.items())}
        found = {}
        for file in folder.glob("*.safetensors"):
            found |= load_file(file)
        if found.keys() != self._base.keys():  # transformers stores its modules under other names
            found = dict(_load(folder, self.head).named_parameters())
        return {name: found[name].detach() for name in self._base}

    def outputs(self, weights: Weights, tokens: Sequence[int]) -> Tensor:
        """Return the logits after each token, (T, V), or the score after each token, (T,)."""
        ids = torch.tensor([list(tokens)])
        call = torch.func.functional_call
        if self.head != "value":
            found = call(self._model, self._merged(weights), (ids,), {"use_cache": False}, tie_weights=True).logits[0]
            return found if self.head == "lm" else found[:, 1] - found[:, 0]
        states: list[Tensor] = []  # the class returns the score of the last token alone
        hook = self._model.score.register_forward_hook(lambda _module, _inputs, output: states.append(output))
        try:
            call(self._model, self._merged(weights), (ids,), {"use_cache": False}, tie_weights=True)
        finally:
            hook.remove()
        return states[0][0, :, 0]

    def log_distributions(self, weights: Weights, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Return log softmax(logits / temperature) in the place of each token but the first, (T - 1, V)."""
        return (self.outputs(weights, tokens)[:-1] / temperature).log_softmax(-1)

    def logprobs(
        self, weights: Weights, tokens: Sequence[int], temperature: float = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        """Return the log-probability of each token given those before it, (T,). 0 for the first.

        With `mask`, tokens where it is False get 0, and their logits are not computed, which saves time with a large
        vocabulary.
        """
        wanted = torch.ones(len(tokens), dtype=torch.bool) if mask is None else mask.clone()
        wanted[:1] = False
        places, ids = wanted.nonzero()[:, 0], torch.tensor(list(tokens))
        how = {"use_cache": False, "logits_to_keep": places - 1}
        logits = torch.func.functional_call(
            self._model, self._merged(weights), (ids[None],), how, tie_weights=True
        ).logits[0]
        own = (logits / temperature).log_softmax(-1).gather(-1, ids[places][:, None])[:, 0]
        return own.new_zeros(len(ids)).index_put((places,), own)

    def values(self, weights: Weights, tokens: Sequence[int]) -> Tensor:
        """Return the score of the state before each token, (T,). 0 for the first."""
        found = self.outputs(weights, tokens)
        return torch.cat([found.new_zeros(1), found[:-1]])

    def _merged(self, weights: Weights) -> dict[str, Tensor]:
        if self._scale is None or not weights:
            return dict(weights)
        found = dict[str, Tensor]()
        for name, low in weights.items():
            module, is_a, _ = name.partition(".lora_A.weight")
            if not is_a:
                continue
            high, experts = weights[f"{module}.lora_B.weight"], module.removesuffix(".base_layer")
            if not experts.endswith(".mlp.experts"):
                found[f"{module}.weight"] = self._base[f"{module}.weight"] + self._scale * (high @ low)
                continue
            # peft nests the wrappers of a layer's parameters, the first of them inside.
            places = [f"{experts}.{each}" for each in ("gate_up_proj", "down_proj")]
            is_both = f"{experts}.base_layer.lora_A.weight" in weights
            is_transposed = getattr(self._model.get_submodule(experts), "is_transposed", False)
            shape = (low.shape[1], len(high)) if is_transposed else (len(high), low.shape[1])
            fits = [self._base[each].shape[1:] == shape for each in places]
            place = places[experts == module] if is_both else places[fits.index(True)]
            n = len(self._base[place])
            product = "ore,eri->eio" if is_transposed else "ore,eri->eoi"
            change = torch.einsum(product, high.unflatten(1, (-1, n)), low.unflatten(0, (n, -1)))
            found[place] = self._base[place] + self._scale * change
        return found


def _load(folder: Path, head: HeadName) -> Any:
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    kinds = {
        "lm": transformers.AutoModelForCausalLM,
        "value": transformers.AutoModelForSequenceClassification,
        "step": transformers.AutoModelForTokenClassification,
    }
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others have no float64
    return kinds[head].from_pretrained(folder, dtype=torch.float32, **how)


def _adapter_scale(folder: Path) -> float:
    values = json.loads((folder / _ADAPTERS).read_text(encoding="utf-8"))
    rank, alpha = values["r"], values["lora_alpha"]
    return alpha / math.sqrt(rank) if values.get("use_rslora") else alpha / rank
