"""The decoder-only transformer of all families, with grouped-query attention and gated MLPs or experts.

Sequences are packed end to end into one dimension of tokens. The argument `attend` decides which tokens attend to
which, so the same model trains and decodes. Parameter names are those of `named_parameters`.

Shape letters: N tokens, D hidden size, H query heads, K key heads, C head dimension, V vocabulary; H, K and V are this
rank's share under tensor parallelism. For logits and values, K is the number of positions at which they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from areno.kernels.backend import can_use_triton
from areno.kernels.matmul import pad_rows
from areno.kernels.symmetric_memory import SymmetricMemory
from areno.layers.adapter import Adapter
from areno.layers.attention import Attend, FirstTokensAttend, PackedAttend
from areno.layers.delta import GatedDelta
from areno.layers.embedding import ValueHead, VocabParallelEmbedding
from areno.layers.experts import ExpertAdapter, ExpertMatrices
from areno.layers.linear import ColumnParallelLinear, RowParallelLinear
from areno.layers.norm import RMSNorm, ShardedRMSNorm
from areno.layers.rotary import Rotary
from areno.layers.routing import Routing
from areno.layers.shard import TensorPart, WeightSpec
from areno.models.activation_offload import ActivationOffload
from areno.models.config import TransformerConfig
from areno.models.families import module_names
from areno.models.layer import Layer


class Transformer(nn.Module):
    """The decoder-only transformer of all families.

    Parameters have a fixed order and may be replaced by views of a flat buffer (`parameter.data = view`). A tied
    embedding is one parameter. Norm weights and biases have one dimension, matrices two. All parameters have one dtype,
    except those in `config.float32`.

    Attributes:
        row_multiple: the number of tokens of a pass is padded to a multiple of this, for `engine.exact`.
        on_stage_backward: a function that the backward pass calls with the index of a stage (see `backward_stage`),
            such as that of a layer, once the gradients of all parameters in this stage and in later stages are
            complete.
    """

    def __init__(self, config: TransformerConfig, spec: WeightSpec):
        super().__init__()
        self.config = config
        self.tp = spec.tp
        self.row_multiple = 1
        self.on_stage_backward: Callable[[int], None] | None = None
        vocab, size, stored = config.vocab_size, config.hidden_size, config.stored_vocab_size
        self.embed = VocabParallelEmbedding(vocab, size, spec, stored)
        ropes = list(dict.fromkeys(config.layer_kind(index).rope for index in range(config.num_layers)))
        self.rotaries = nn.ModuleList(Rotary(rope, config.head_dim, device=spec.device) for rope in ropes)
        self.rotary_of = [ropes.index(config.layer_kind(index).rope) for index in range(config.num_layers)]
        experts = config.experts
        self.routing = None if experts is None else Routing(experts, len(experts.layers(config.num_layers)))
        self.layers = nn.ModuleList(Layer(config, index, spec, self.routing) for index in range(config.num_layers))
        self.final_norm = RMSNorm(size, config.rms_norm_eps, spec, plus_one=config.norm_plus_one)
        self.head = self.score = None
        if config.head != "lm":
            self.score = ValueHead(size, spec, config.n_labels)
        elif not config.tie_word_embeddings:
            self.head = VocabParallelEmbedding(vocab, size, spec, stored)
        for name, parameter in self.named_parameters():
            module, _, kind = name.rpartition(".")
            names = [f"{each}.{kind}" for each in module_names(module, config)] if config.float32 else []
            if any(each.split(".", 3)[-1] in config.float32 for each in names):
                parameter.data = parameter.data.float()

    def forward(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        recompute: bool = False,
        n_kept: int = 0,
        split: bool = False,
        offload: ActivationOffload | None = None,
    ) -> Tensor:
        """Return the hidden states after the final norm, (N, D), the same on every rank.

        `positions_N`: the position of each token in its sequence. With `recompute` (activation checkpointing), all but
        the last `n_kept` layers keep little for the backward pass. With `split` (sequence parallelism), each rank has
        an equal share of the tokens of the residual stream, so N must be a multiple of the number of ranks. Recomputed
        layers save what they keep in `offload`, which has begun a pass.
        """
        assert not split or len(tokens_N) % self.tp.size == 0 == self.row_multiple - 1, (
            "the ranks do not divide the tokens"
        )
        n_tokens = len(tokens_N)
        if more := -n_tokens % self.row_multiple:
            tokens_N, positions_N = F.pad(tokens_N, (0, more)), F.pad(positions_N, (0, more))
            attend = FirstTokensAttend(attend, n_tokens)
        angles = [rotary(positions_N) for rotary in self.rotaries]  # cos and sin
        x_ND = self.embed(tokens_N, split)
        if self.config.embed_scale != 1.0:  # rounded as in transformers
            x_ND = x_ND * torch.tensor(self.config.embed_scale, dtype=x_ND.dtype).item()
        n_recomputed = max(0, len(self.layers) - n_kept) if recompute else 0
        if self.runs_fused(attend):
            # Imported here, since they need Triton.
            from areno.models.few_rows import can_run_few_rows, few_rows_layers
            from areno.models.fused import fused_layer, fused_norm

            layers: list[Layer] = list(self.layers)  # type: ignore[arg-type]
            if not split and can_run_few_rows(layers, n_tokens, attend):
                of_layers = [angles[rotary] for rotary in self.rotary_of]
                return few_rows_layers(layers, self.final_norm, x_ND, of_layers, attend)
            x_ND, delta_ND, memory = x_ND.float(), None, None if split else self._memory_for_norms(x_ND)
            for index, layer in enumerate(self.layers):
                self._hook_stage(x_ND, index)
                keep = index >= n_recomputed
                cos, sin = angles[self.rotary_of[index]]
                x_ND, delta_ND = fused_layer(layer, x_ND, delta_ND, cos, sin, attend, keep, split, memory, offload)  # type: ignore[arg-type]
            assert delta_ND is not None, "a model without layers"
            self._hook_stage(x_ND, len(self.layers))
            hidden_ND = fused_norm(self.final_norm, x_ND, delta_ND, memory)
            return self.tp.gather_rows_equal(hidden_ND) if split else hidden_ND
        for index, layer in enumerate(self.layers):
            self._hook_stage(x_ND, index)
            cos, sin = angles[self.rotary_of[index]]
            if index < n_recomputed and torch.is_grad_enabled():
                with nullcontext() if offload is None else offload.saving_input(x_ND):
                    x_ND = checkpoint(
                        layer, x_ND, cos, sin, attend, split, use_reentrant=False, preserve_rng_state=False
                    )
            else:
                x_ND = layer(x_ND, cos, sin, attend, split)
        self._hook_stage(x_ND, len(self.layers))
        hidden_ND = self.final_norm(x_ND)[:n_tokens]
        return self.tp.gather_rows_equal(hidden_ND) if split else hidden_ND

    def _memory_for_norms(self, x_ND: Tensor) -> SymmetricMemory | None:
        """Return the symmetric memory through which norms sum over ranks, or None if this pass cannot use it.

        A pass can use it if all of these hold: gradients are off, there are few tokens, the model has norms only before
        attention and MLP, row-parallel layers have no biases, and sums need no fixed order (`engine.exact` is off).
        """
        memory, config, (n, size) = self.tp.symmetric_memory, self.config, x_ND.shape
        if memory is None or torch.is_grad_enabled() or not memory.can_add_and_norm(n, size, self.embed.weight.dtype):
            return None
        if self.tp.in_order:  # the norm of training sums the squares of a row in another order
            return None
        return memory if config.norms == "before" and not config.o_bias and not config.mlp_bias else None

    def _hook_stage(self, x_ND: Tensor, stage: int) -> None:
        """Make the backward pass call `on_stage_backward(stage)` when it has the gradient of `x_ND`, the stage's input.

        All gradients of this and later stages are complete then, because autograd runs later nodes first.
        """
        if self.on_stage_backward is not None and x_ND.requires_grad:
            report = self.on_stage_backward
            x_ND.register_hook(lambda _: report(stage))

    def freeze_attention(self) -> None:
        """Stop training the attention of all layers. Its parameters get memory of their own, if they have none yet."""
        for layer in self.layers:
            module = layer.attention or layer.delta
            assert isinstance(module, nn.Module)
            for parameter in module.parameters():
                parameter.requires_grad_(False)
                parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def backward_stage(self, parameter: str) -> int:
        """Return the stage of a parameter. The backward pass completes the gradients of the largest stage first.

        The stage of a layer's parameter is the index of the layer. The final norm and the head have the largest stage,
        and the embedding has -1.
        """
        module, _, rest = parameter.partition(".")
        if module == "layers":
            return int(rest.partition(".")[0])
        return -1 if module == "embed" else len(self.layers)

    def runs_fused(self, attend: Attend) -> bool:
        """Return whether the layers run as the fused kernels of `models/fused.py`.

        This requires Triton. If gradients are on, it also requires that `attend` is a `PackedAttend`, which has a
        backward function, and that every trained parameter has a float32 `grad` in which to accumulate. Results equal
        those of `Layer.forward`, except for rounding.
        """
        if not can_use_triton(self.embed.weight):
            return False
        if not torch.is_grad_enabled():
            return True
        grads = [parameter.grad for parameter in self.parameters() if parameter.requires_grad]
        buffered = all(grad is not None and grad.dtype == torch.float32 for grad in grads)
        return buffered and isinstance(attend, PackedAttend)

    def has_finite_weights(self) -> bool:
        return all(is_finite(parameter.detach()) for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def lm_head(self) -> VocabParallelEmbedding:
        """This rank's rows of the LM head, which is the embedding if the weights are tied."""
        assert self.score is None, "a value model has no vocabulary head"
        return self.embed if self.head is None else self.head

    def logits(self, hidden_KD: Tensor) -> Tensor:
        """Return the logits of all token ids, (K, vocab_size) float32. Without gradient if there are several ranks."""
        return self.tp.gather(self.logit_columns(hidden_KD))[:, : self.config.vocab_size]

    def logit_columns(self, hidden_KD: Tensor) -> Tensor:
        """Return this rank's columns of the logits. All ranks return equally many; padding columns are zero."""
        return self.lm_head.matmul(pad_rows(hidden_KD, self.row_multiple))[: len(hidden_KD)]

    def local_logits(self, hidden_KD: Tensor) -> Tensor:
        """Return this rank's columns of the logits without padding columns."""
        return self.logit_columns(hidden_KD)[:, : self.lm_head.n_valid]

    def values(self, hidden_KD: Tensor) -> Tensor:
        """Return the values, (K,) float32. For a process reward model, a value is the log-odds of "right"."""
        assert self.score is not None, "a language model has no value head"
        return self.score(hidden_KD)

    def tensor_parts(self, parameter: str) -> tuple[TensorPart, ...]:
        """Return where each checkpoint tensor lies in a parameter, in the order of the rows."""
        layer, kind = parameter.rsplit(".", 1)
        return self.get_submodule(layer).layout[kind]  # type: ignore[return-value, index]

    def matrix_parts(self, parameter: str) -> tuple[TensorPart, ...]:
        """Return the matrices in a parameter that are maps between activations, as `tensor_parts`.

        They are the projections, also those of experts and of adapters. Empty for embedding, head, norm, bias,
        convolution and router.
        """
        module = self.get_submodule(parameter.rsplit(".", 1)[0])
        is_map = isinstance(module, (ColumnParallelLinear, RowParallelLinear, ExpertMatrices, Adapter, ExpertAdapter))
        return self.tensor_parts(parameter) if is_map and self.get_parameter(parameter).dim() == 2 else ()

    def is_sharded(self, parameter: str) -> bool:
        return self.tp.size > 1 and self.tensor_parts(parameter)[0].dim is not None

    def partial_gradient_slices(self, parameter: str, split: bool = False) -> list[tuple[slice, int]]:
        """Return the slices of a parameter whose gradient must still be summed over ranks after a backward pass.

        Each item is (slice of the flattened parameter, n): groups of n neighbouring ranks hold copies of the slice and
        must sum its gradient. `split`: the pass was sequence-parallel.
        """
        whole = self.get_parameter(parameter)
        module = self.get_submodule(parameter.rsplit(".", 1)[0])
        if split and isinstance(module, RMSNorm) and not module.own_data:
            return [(slice(0, whole.numel()), self.tp.size)]
        row = math.prod(whole.shape[1:])
        parts = [part for part in self.tensor_parts(parameter) if part.copies > 1]
        return [(slice(part.offset * row, (part.offset + part.size) * row), part.copies) for part in parts]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialise the weights at random.

        Matrices and sinks are normal, see `_initial_std`. Norms multiply by 1. Biases and the weights of a value head
        are 0. Decay rates of recurrent states are uniform from 0.01 to 16. The full tensors depend only on the seed and
        the device type, not on the number of ranks.
        """
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(0.0 if module.plus_one else 1.0)
            elif isinstance(module, ShardedRMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, VocabParallelEmbedding):
                module.clear_padding()
            elif isinstance(module, ValueHead):
                module.weight.zero_()
            elif isinstance(module, GatedDelta):
                module.dt_bias.fill_(1.0)
        device = self.device
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith((".bias", ".e_score_correction_bias")):
                parameter.zero_()
            elif (
                (is_decay := name.endswith(".A_log"))
                or name.endswith(".sinks")
                or (parameter.dim() >= 2 and name != "score.weight")
            ):
                for part in self.tensor_parts(name):
                    full = torch.empty(part.full_shape, dtype=torch.float32, device=device)
                    if is_decay:
                        full.uniform_(0.01, 16.0, generator=generator).log_()
                    else:
                        full.normal_(0.0, self._initial_std(name), generator=generator)
                    part.region(parameter).copy_(part.shard_of(full))

    def _initial_std(self, parameter: str) -> float:
        """Return the standard deviation of random weights: `initializer_range` of the config, as in transformers.

        With experts, a token's embedding must not drown in the outputs of the layers. Routers would otherwise send most
        tokens to few experts, or change their choice with every rounding error. So an embedding that is not the head is
        drawn with 1, the default of torch, and what is added to it with 1 / sqrt(2 layers) of the range, as in GPT-2.
        """
        config = self.config
        if config.experts is not None and not config.tie_word_embeddings:
            if parameter == "embed.weight":
                return 1.0
            if parameter.endswith(("out.weight", "down.weight")):
                return config.initializer_range / math.sqrt(2 * config.num_layers)
        return config.initializer_range


def is_finite(tensor: Tensor) -> bool:
    # If any number is NaN, so are minimum and maximum. Unlike a mask, they take no memory.
    return tensor.numel() == 0 or bool(torch.stack(tensor.aminmax()).isfinite().all())
