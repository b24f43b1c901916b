"""Rows to train on, and models beside the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np


@dataclass
class TrainSequence:
    """One row to train on. Per-token lists and arrays cover `tokens` (prompt and response) and have its length.

    Attributes:
        prompt_mask: True for tokens that are not trained (prompt, tool results). Losses train on all other tokens.
        tokens: Token ids.
        logprobs: Log-probability of `tokens[t]` given `tokens[:t]`, from the rollout, under the policy that sampled
            the token. 0.0 on the prompt.
        old_logprobs: Log-probability of each token from the training pass, under the policy before its first update on
            this row. Importance ratios divide by these probabilities. `Trainer.train` sets the field for later calls.
            None, or NaN for a token, stands for the policy at the start of the call. Set it to None after changing
            tokens or temperature.
        advantages, returns, values, ref_logprobs: One value per token. None if the loss does not need them.
        teacher_logprobs: Log-probability of each token under a teacher, for the sampled form of distillation.
        teacher: Name of the role whose model is the teacher of this row. None stands for the role of the divergence
            (`Divergence.role`).
        teacher_prompt: Token ids that a teacher reads in place of the tokens before `response_start`. None if the
            teacher reads the same tokens.
        response_start: Index of the first token after the prompt that `teacher_prompt` replaces. None stands for the
            first trained token.
        teacher_top: (token ids, log-probabilities) of the J most likely tokens under a teacher that does not run in
            areno, or under the policy that sampled, each of shape (tokens of the row, J). As in `logprobs`, index t has
            the distribution of `tokens[t]` given `tokens[:t]`. An id of -1 stands for no token, where a list is
            shorter. Log-probabilities are at the temperature of training. Only indices of trained tokens are read.
        reward: Reward of the whole row.
        eos_token_id: For scripts that pad rows themselves. areno packs rows and does not read it.
        weights: Factor on the policy loss of each token, such as the importance weight of a stale sample. None is 1.
        kl_weights: Factor on the absolute log-ratio of each token, which is added to its policy loss. None is 0.
        staleness: Number of optimizer steps since the policy that sampled the row. 0 is on-policy.
        turns: For an agent, the turn of each token: its index in `turn_rewards`.
        turn_rewards: For an agent, the reward of each turn of the sample, which add up to `reward`.
        logit_gradients: For estimators of advantages that read it, a number for each token, see `TokenValue`.
        reward_parts: The parts of the reward of the sample by name, without weights, see `RewardOutcome`.
        routes: Experts that training uses for the first n tokens (routing replay): integers of shape (n, layers with
            experts, experts per token), as in RolloutSequence.routes. None lets the router choose.
    """

    prompt_mask: list[bool] | np.ndarray | None = None
    tokens: list[int] | np.ndarray | None = None
    logprobs: list[float] | np.ndarray | None = None
    advantages: list[float] | np.ndarray | None = None
    returns: list[float] | np.ndarray | None = None
    values: list[float] | np.ndarray | None = None
    ref_logprobs: list[float] | np.ndarray | None = None
    reward: float = 0.0
    eos_token_id: int = 0
    weights: list[float] | np.ndarray | None = None
    staleness: int = 0
    routes: np.ndarray | None = None
    old_logprobs: list[float] | np.ndarray | None = None
    teacher_logprobs: list[float] | np.ndarray | None = None
    teacher: str | None = None
    teacher_prompt: list[int] | np.ndarray | None = None
    response_start: int | None = None
    teacher_top: tuple[Any, Any] | None = None
    turns: np.ndarray | None = None
    turn_rewards: np.ndarray | None = None
    reward_parts: Mapping[str, float] | None = None
    kl_weights: list[float] | np.ndarray | None = None
    logit_gradients: list[float] | np.ndarray | None = None

    def for_teacher(self) -> tuple[Any, int]:
        """Return the tokens that a teacher reads, and the index from which they are the tokens of this row.

        Returns:
            (tokens, first). The tokens end with `self.tokens[first:]`. Without a `teacher_prompt`, `first` is 0.
        """
        tokens = [] if self.tokens is None else self.tokens
        if self.teacher_prompt is None:
            return tokens, 0
        first = self.response_start
        if first is None:
            mask = [] if self.prompt_mask is None else list(self.prompt_mask)
            first = mask.index(False) if False in mask else len(tokens)
        return [*self.teacher_prompt, *tokens[first:]], first


TokenValue = Literal["logprob", "entropy", "logit_gradient"]
"""What a model says of a token, given those before it.

"logprob": its log-probability. "entropy": the entropy of its distribution q, in nats. "logit_gradient": the squared
norm of the gradient of the log-probability with respect to the logits, 1 - 2 q(token) + sum_v q_v^2.
"""


@dataclass(slots=True)
class ModelRole:
    """A model beside the policy, for Trainer.ensure_roles.

    Attributes:
        name: "ref" computes log-probabilities, "critic" a value per token, "reward" a score per row. Other names are
            free.
        path: Model folder or hub id.
        trainable: Whether the model is trained and gets an optimizer. Only models with a value head can be trained.
        optimizer_lr: Learning rate of a trainable model. None takes the learning rate of the policy.
    """

    name: str
    path: str
    trainable: bool
    optimizer_lr: float | None = None
