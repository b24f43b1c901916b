"""The optimizers: the memory of their state, the cost of an update, and their settings. Imports no torch.

The updates themselves are in engine/train/optimizer_updates.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areno.config.resuming import NEVER
from areno.schema.fields import Flag, Needs, Section, setting

OptimizerType = Literal["adam", "adam_bf16", "adam_8bit", "muon", "sgd"]
MOMENT_BLOCK = 256
"""Elements of an 8-bit moment that share a scale."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """The memory that an optimizer needs for each trained parameter, and the cost of an update."""

    help: str
    moment_bytes: float  # of all moments with their scales, for a trained parameter
    update_bytes: float  # that an update reads and writes for a trained parameter, fitted on an H100
    matrix_flops: float = 0  # for a parameter of a matrix and an element of its shorter side, by arithmetic
    matrix_moment_bytes: float | None = None  # for a parameter of a matrix that is updated as a whole. None: as others
    block: int = 1  # parameters that share a scale of a moment
    smaller: OptimizerType | None = None  # an optimizer with the same settings that needs less memory
    price: str = ""  # of this optimizer, in place of the one that it is the smaller one of

    def state_bytes(self, n: int, n_in_matrices: int) -> int:
        """Return the bytes of the moments of `n` trained parameters."""
        in_matrices = self.moment_bytes if self.matrix_moment_bytes is None else self.matrix_moment_bytes
        return int(in_matrices * n_in_matrices + self.moment_bytes * (n - n_in_matrices))


OPTIMIZERS: dict[OptimizerType, OptimizerKind] = {
    "adam": OptimizerKind(
        help="AdamW with fp32 moments, 8 bytes per parameter", moment_bytes=8, update_bytes=30, smaller="adam_8bit"
    ),
    "adam_bf16": OptimizerKind(
        help="AdamW with moments in bfloat16, rounded stochastically, 4 bytes per parameter",
        moment_bytes=4,
        update_bytes=22,  # by arithmetic
        smaller="adam_8bit",
    ),
    "adam_8bit": OptimizerKind(
        help="AdamW with moments quantized to 8 bits in blocks, 2 bytes per parameter",
        moment_bytes=2 * (1 + 4 / MOMENT_BLOCK),
        update_bytes=18,
        block=MOMENT_BLOCK,
        price="moments are rounded to 8 bits",
    ),
    "muon": OptimizerKind(
        help="Muon for the projections of layers, adapters and experts, 4 bytes per parameter of momentum; AdamW, "
        "with 8 bytes, for embedding, head, norms, biases and routers",
        moment_bytes=8,
        update_bytes=80,  # by arithmetic
        matrix_moment_bytes=4,
        matrix_flops=5 * (2 + 2 + 1),
    ),
    "sgd": OptimizerKind(help="SGD without momentum, which has no moments", moment_bytes=0, update_bytes=14),
}
WITH_MOMENTS = tuple(name for name, kind in OPTIMIZERS.items() if kind.moment_bytes)

ADAM_8BIT = Flag(
    "--adam-8bit",
    "adam_8bit",
    "Use AdamW with moments that are quantized to 8 bits in blocks. The moments then take 2 bytes per parameter "
    "instead of 8",
)
_MOMENTS = Needs("type", *WITH_MOMENTS, so="there are no moments")


@dataclass(kw_only=True)
class MuonConfig(Section):
    """Momentum whose direction is orthogonalised for each matrix (kellerjordan.github.io/posts/muon, arXiv 2502.16982).

    With M the momentum of a matrix and G its gradient, W <- (1 - lr weight_decay) W - lr s NS(G + momentum (M - G)).
    NS maps all singular values to about 1, by steps x <- a x + (b x x^T + c (x x^T)^2) x from x = M / |M|, where (a, b,
    c) = (3.4445, -4.775, 2.0315). A matrix is a tensor of the checkpoint: q, k, v, gate, up and each expert are apart.
    """

    momentum: float = setting(0.95, help="Decay rate of the momentum", ge=0, lt=1)
    nesterov: bool = setting(True, help="true: Nesterov momentum, as in the formula. false: NS(M)")
    ns_steps: int = setting(5, help="Number of Newton-Schulz steps", gt=0)
    scale_mode: Literal["match_rms_adamw", "spectral"] = setting(
        "match_rms_adamw",
        help="The factor s. match_rms_adamw: 0.2 max(rows, columns)^0.5, for learning rates of AdamW. spectral: "
        "max(1, rows / columns)^0.5, with a learning rate of its own, often near 0.02 from scratch",
    )
    ns_dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", help="Dtype of the products on a GPU. On a CPU, always float32"
    )


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """AdamW, Muon or SGD with fp32 master weights. Norm weights and biases have no weight decay."""

    type: OptimizerType = setting(
        "adam",
        help=". ".join(f"{name}: {kind.help}" for name, kind in OPTIMIZERS.items()),
        flag=ADAM_8BIT,
        on_resume=NEVER,
    )
    lr: float = setting(1e-6, help="Peak learning rate. 0: the weights do not change", ge=0, flag="--lr")
    min_lr_ratio: float = setting(
        0.1,
        help="Learning rate at the end of the decay, as a fraction of lr",
        ge=0,
        le=1,
        only_with=Needs("lr_scheduler_type", "linear", "cosine", so="lr does not decay"),
        flag=Flag("--min-lr", help="Learning rate at the end of its decay. Default: a tenth of --lr"),
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "cosine", help="Shape of the decay of the learning rate. constant: no decay", flag="--lr-decay-style"
    )
    lr_decay_steps: int | None = setting(
        None,
        help="Optimizer steps, with warm-up, until the learning rate is min_lr_ratio * lr. null: all of the run, or "
        "1000 in a script that calls areno.Trainer",
        gt=0,
        flag=Flag(
            "--lr-decay-steps",
            help="Number of optimizer steps, including warm-up, after which the learning rate has decayed to --min-lr. "
            "Default: all optimizer steps of the run",
        ),
    )
    warmup_steps_proportion: float = setting(
        0.001, help="Linear warm-up from 0 to lr, as a fraction of lr_decay_steps", ge=0, lt=1
    )
    beta1: float = setting(
        0.9, help="Decay rate of Adam's first moment", ge=0, lt=1, only_with=_MOMENTS, flag="--adam-beta1"
    )
    beta2: float = setting(
        0.999, help="Decay rate of Adam's second moment", ge=0, lt=1, only_with=_MOMENTS, flag="--adam-beta2"
    )
    eps: float = setting(
        1e-8, help="Small number that Adam adds to the square root of the second moment", gt=0, only_with=_MOMENTS
    )
    weight_decay: float = setting(
        0.01, help="Decoupled weight decay. Norm weights and biases are not decayed", ge=0, flag="--weight-decay"
    )
    gradient_clipping: float = setting(
        1.0,
        help="Largest global norm of the gradients, which are scaled down to it. 0: no clipping",
        ge=0,
        flag="--grad-clip-norm",
    )
    muon: MuonConfig = setting(
        factory=MuonConfig,
        help="Muon, for the matrices of the layers. lr, its schedule and weight_decay hold for all parameters; "
        "beta1, beta2 and eps for those of AdamW",
        only_with=Needs("type", "muon", so="no matrix is orthogonalised"),
    )
