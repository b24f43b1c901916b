"""What some draws need beside the sampling kernel: bias, presence penalty, min-p, the most likely tokens.

Few requests ask for it, so it is done by torch on the rows of these requests alone, outside of captured graphs. The
kernel then draws from the edited logits, while log-probabilities stay those of the policy.

Shape letters: B rows of the batch, R rows of these that need something, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.sequence import Sequence
from areno.engine.sampling.slot_sampler import SlotSampler
from areno.kernels.sampling import SamplingFlags
from areno.kernels.sampling.mask import apply_masks
from areno.kernels.sampling.reference import without_banned
from areno.types import TokenScores


@dataclass(slots=True)
class LogitEdits:
    """What the rows of a batch need, on the device.

    rows_R: int64, their places in the batch. bias: (rows, token ids, values) to add, one for each entry; rows count
    within R. presence_R, frequency_R, min_p_R: float32. n_top: how many most likely tokens some row wants.
    """

    rows_R: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None
    presence_R: Tensor
    frequency_R: Tensor
    min_p_R: Tensor
    n_top: int

    @classmethod
    def of(cls, sequences: list[Sequence], upload: Callable[[np.ndarray], Tensor]) -> LogitEdits | None:
        """None where no sequence needs anything, as is the rule."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.needs_edits]
        if not rows:
            return None
        chosen = [sequences[row] for row in rows]
        params = [sequence.request.params for sequence in chosen]
        biases = [(r, token, value) for r, s in enumerate(chosen) for token, value in s.request.logit_bias.items()]
        floats = [(p.presence_penalty, p.frequency_penalty, 0.0 if p.is_greedy else p.min_p) for p in params]
        presence_R, frequency_R, min_p_R = upload(np.array(floats, dtype=np.float32).T.copy()).unbind()
        bias = None
        if biases:
            at = upload(np.array([entry[:2] for entry in biases], dtype=np.int64).T.copy())
            bias = (at[0], at[1], upload(np.array([entry[2] for entry in biases], dtype=np.float32)))
        n_top = max(sequence.request.top_logprobs for sequence in chosen)
        return cls(upload(np.array(rows, dtype=np.int64)), bias, presence_R, frequency_R, min_p_R, n_top)

    def apply(
        self, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, sampler: SlotSampler, flags: SamplingFlags
    ) -> Tensor:
        """Return the logits with bias, presence penalty and min-p.

        Frequency penalties, bans and masks are applied later. Here they only decide which tokens min-p compares with.
        """
        edited_RV, settings = logits_RV.clone(), sampler.tensors
        if self.bias is not None:
            rows, tokens, values = self.bias
            edited_RV.index_put_((rows, tokens), values, accumulate=True)
        drawn_RV = edited_RV
        if settings.counts is not None:
            counts_RV = settings.counts[slots_R]
            edited_RV -= self.presence_R[:, None] * (counts_RV > 0)
            drawn_RV = edited_RV - self.frequency_R[:, None] * counts_RV
        if flags.n_banned:
            drawn_RV = without_banned(drawn_RV, slots_R, positions_R, settings)
        if sampler.masks_SW is not None:
            drawn_RV = apply_masks(drawn_RV, sampler.masks_SW, slots_R)
        # Relative to the most likely token that can be drawn; log(0) keeps all.
        drawn_RV = drawn_RV / settings.temperature[slots_R, None]
        least_R = drawn_RV.max(dim=-1).values + self.min_p_R.log()
        return edited_RV.masked_fill_(drawn_RV < least_R[:, None], -torch.inf)


def sample_edited(
    logits_BV: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    sampler: SlotSampler,
    flags: SamplingFlags,
    edits: LogitEdits,
) -> Tensor:
    """`SlotSampler.sample` with edits.

    Returns (2 + 2 * n_top, B) float64: tokens, log-probabilities, then the ids of the most likely tokens and their
    log-probabilities, which are -1 for the rows that need nothing.
    """
    rows_R, slots_R = edits.rows_R, slots_B[edits.rows_R]
    policy_RV = logits_BV[rows_R]
    edited_RV = edits.apply(policy_RV, slots_R, positions_B[rows_R], sampler, flags)
    edited_BV = logits_BV.index_copy(0, rows_R, edited_RV)
    out_2B = sampler.sample(edited_BV, slots_B, positions_B, flags)
    logprobs_RV = (policy_RV / sampler.tensors.temperature[slots_R, None]).double().log_softmax(-1)
    tokens_R = out_2B[0, rows_R].long()
    out_2B[1, rows_R] = logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1)
    top_2KB = out_2B.new_full((2, edits.n_top, out_2B.shape[1]), -1)
    if edits.n_top:
        values_RK, ids_RK = logprobs_RV.topk(edits.n_top, dim=-1)
        top_2KB[0, :, rows_R] = ids_RK.T.double()
        top_2KB[1, :, rows_R] = values_RK.T
    return torch.cat([out_2B, top_2KB.flatten(0, 1)])


def scores_of(scaled_KV: Tensor, tokens: list[int], n_top: int) -> list[tuple[float, TokenScores]]:
    """For K places: the log-probability of a token under softmax(scaled), and the most likely tokens."""
    logprobs_KV = scaled_KV.double().log_softmax(-1)
    chosen = torch.tensor(tokens, device=scaled_KV.device)[:, None]
    values_KT, ids_KT = logprobs_KV.topk(n_top, dim=-1)
    found = torch.cat([ids_KT.T.double(), values_KT.T]).cpu().numpy()
    logprobs = logprobs_KV.gather(1, chosen).squeeze(1).tolist()
    return list(zip(logprobs, token_scores(found, len(tokens)), strict=True))


def token_scores(top: np.ndarray, n: int) -> list[TokenScores]:
    """(2T, n) ids and log-probabilities of the T most likely tokens at n places, as lists."""
    if not len(top):
        return [[] for _ in range(n)]
    ids, logprobs = np.split(top, 2)
    pairs = zip(ids.T.astype(np.int64).tolist(), logprobs.T.tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]
