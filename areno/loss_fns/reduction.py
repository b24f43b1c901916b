"""How the losses of tokens become one number. The choice changes what is optimised, so it has a name.

With rows i, their trained tokens t and T_i of them:
seq_mean_token_mean      mean_i 1/T_i sum_t    GRPO (arXiv 2402.03300 eq. 3): every row weighs the same
token_mean               sum_it / sum_i T_i    DAPO (arXiv 2503.14476 eq. 8): every token weighs the same
seq_mean_token_sum_norm  mean_i 1/L sum_t      Dr.GRPO (arXiv 2503.20783 sec. 3.2): a constant L, so length has no pull
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from areno.loss_fns.pack import DataPack

Reduction = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


def reduce_tokens(pack: DataPack, values_T: Tensor, reduction: Reduction, norm_length: float | None = None) -> Tensor:
    """(T,) values of trained tokens -> 0-dim: this micro-batch's share of the step's value.

    norm_length: the constant L of seq_mean_token_sum_norm, in tokens (usually the longest completion allowed).
    """
    if reduction == "seq_mean_token_mean":
        return pack.row_mean(pack.mean_rows(values_T))
    if reduction == "token_mean":
        return pack.token_mean(values_T)
    if reduction == "seq_mean_token_sum_norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError(
                f"reduction seq_mean_token_sum_norm divides by norm_length, which is {norm_length}; give a positive "
                "number of tokens, such as gconfig.max_new_tokens"
            )
        return pack.row_mean(pack.sum_rows(values_T)) / norm_length
    raise ValueError(f"reduction is {reduction!r}; expected seq_mean_token_mean, token_mean or seq_mean_token_sum_norm")
