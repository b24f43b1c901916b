"""The optimizers: the memory of their state, and the cost of an update. Imports no torch.

The updates themselves are in engine/train/optimizer_updates.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OptimizerType = Literal["adam", "adam_8bit", "sgd"]
MOMENT_BLOCK = 256
"""Elements of an 8-bit moment that share a scale."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """The memory that an optimizer needs for each trained parameter, and the cost of an update."""

    help: str
    moment_bytes: float  # of all moments with their scales, for a trained parameter
    update_bytes: float  # that an update reads and writes for a trained parameter, fitted on an H100
    block: int = 1  # parameters that share a scale of a moment
    smaller: OptimizerType | None = None  # an optimizer with the same settings that needs less memory
    price: str = ""  # of this optimizer, in place of the one that it is the smaller one of


OPTIMIZERS: dict[OptimizerType, OptimizerKind] = {
    "adam": OptimizerKind(
        help="AdamW with fp32 moments, 8 bytes per parameter", moment_bytes=8, update_bytes=30, smaller="adam_8bit"
    ),
    "adam_8bit": OptimizerKind(
        help="AdamW with moments quantized to 8 bits in blocks, 2 bytes per parameter",
        moment_bytes=2 * (1 + 4 / MOMENT_BLOCK),
        update_bytes=18,
        block=MOMENT_BLOCK,
        price="moments are rounded to 8 bits",
    ),
    "sgd": OptimizerKind(help="SGD without momentum, which has no moments", moment_bytes=0, update_bytes=14),
}
WITH_MOMENTS = tuple(name for name, kind in OPTIMIZERS.items() if kind.moment_bytes)
