"""PPO: Proximal Policy Optimization (arXiv 1707.06347 eq. 7) of tokens, with the dual clip (arXiv 1912.09729 eq. 5)."""

from __future__ import annotations

from functools import partial

from areno.loss_fns.grpo import grpo_loss_fn

ppo_loss_fn = partial(grpo_loss_fn, reduction="token_mean", c_clip=3.0)
"""Clipped surrogate of the token ratio exp(logprobs - old_logprobs), mean over the tokens of the step.

It is the loss of GRPO with another reduction and a dual clip; other settings can be given as to `grpo_loss_fn`. What
makes it PPO are its advantages, which come from a critic (`advantages.gae`). The critic has a loss of its own,
`value.value_loss_fn`.
"""
