"""The loss of an update in float64, from the settings of the run, its training rows and models of transformers.

`formula_of` chooses the formula, and `variants` lists wrong formulas, by which a check can tell what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno.checks.formulas import loss_formulas as formulas
from areno.checks.formulas.loss_formulas import PairObjective, PolicyObjective
from areno.checks.inputs.findings import NotChecked
from areno.checks.steps.transformers_model import TransformersModel, Weights
from areno.checks.steps.watched_run import Update, WatchedRun
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.recipes import distill, dpo, grpo, gspo, kto, online_dpo, ppo, prm, rw, sft
from areno.types import TrainSequence


@dataclass(frozen=True, kw_only=True)
class StepFormula:
    """Base of the formulas of an update: the loss as a function of the weights of the trained role.

    `shift` moves the outputs of the model by this number of tokens, which no right formula does.
    """

    temperature: float = 1.0
    shift: int = 0

    def loss(self, run: WatchedRun, weights: Weights, rows: Sequence[TrainSequence], update: Update) -> Tensor:
        model = run.models[update.role]
        outputs = [self.outputs(model, weights, row) for row in rows]
        return self.of_outputs(outputs, rows, update)

    def outputs(self, model: TransformersModel, weights: Weights, row: TrainSequence) -> Tensor:
        """Return the log-probabilities, or values, at the trained tokens of a row."""
        tokens = np.asarray(row.tokens).tolist()
        if model.head == "lm":
            found = model.logprobs(weights, tokens, self.temperature, None if self.shift else mask_of(row))
        else:
            found = model.values(weights, tokens)
        return found.roll(self.shift)[mask_of(row)]

    def of_outputs(self, outputs: list[Tensor], rows: Sequence[TrainSequence], update: Update) -> Tensor:
        raise NotImplementedError

    def variants(self) -> Iterator[tuple[str, StepFormula]]:
        """Yield wrong formulas, each with what is wrong about a loss that equals it."""
        yield "the outputs of the model are those of the token before", replace(self, shift=1)
        yield "the outputs of the model are those of the token after", replace(self, shift=-1)
        if self.temperature != 1:
            text = "the log-probabilities of training are at temperature 1 and not at that of sampling"
            yield text, replace(self, temperature=1.0)


def mask_of(row: TrainSequence) -> Tensor:
    return ~torch.as_tensor(np.asarray(row.prompt_mask, dtype=bool))


def field_of(row: TrainSequence, name: str) -> Tensor:
    """Return a per-token field of a row at its trained tokens."""
    return torch.as_tensor(np.asarray(vars(row)[name], dtype=np.float64))[mask_of(row)]


def fields_of(rows: Sequence[TrainSequence], name: str) -> list[Tensor] | None:
    return None if any(vars(row)[name] is None for row in rows) else [field_of(row, name) for row in rows]


@dataclass(frozen=True, kw_only=True)
class PolicyFormula(StepFormula):
    objective: PolicyObjective
    from_rollout: bool = False  # ratios divide by the probabilities of the rollout
    interpolates: bool = False  # actor.prox_logp_method=loglinear
    is_weighted: bool = True
    divergence: str | None = None  # from the distributions that the rollout recorded, for `objective.keep`

    def loss(self, run: WatchedRun, weights: Weights, rows: Sequence[TrainSequence], update: Update) -> Tensor:
        if not self.objective.entropy_coef and self.divergence is None:
            return super().loss(run, weights, rows, update)
        outputs, entropies, apart, model = [], [], [], run.models[update.role]
        for row in rows:
            tokens, mask = np.asarray(row.tokens).tolist(), mask_of(row)[1:]
            found = model.log_distributions(weights, tokens, self.temperature)[mask]
            outputs.append(found.gather(-1, torch.tensor(tokens[1:])[mask][:, None])[:, 0])
            entropies.append(-(found.exp() * found).sum(-1))
            if self.divergence is not None:
                assert row.teacher_top is not None
                listed = [torch.as_tensor(each)[1:][mask] for each in row.teacher_top]
                apart.append(formulas.listed_divergence(found, listed[0].long(), listed[1].double(), self.divergence))
        return self.of_outputs(outputs, rows, update, entropies, apart or None)

    def of_outputs(
        self,
        outputs: list[Tensor],
        rows: Sequence[TrainSequence],
        update: Update,
        entropies: list[Tensor] | None = None,
        divergences: list[Tensor] | None = None,
    ) -> Tensor:
        old = fields_of(rows, "logprobs" if self.from_rollout else "old_logprobs")
        old = [row.detach() for row in outputs] if old is None else old
        weights = fields_of(rows, "weights") if self.is_weighted else None
        if self.interpolates:
            rollout = fields_of(rows, "logprobs")
            assert rollout is not None
            apart = [(before - sampled).exp() for before, sampled in zip(old, rollout, strict=True)]
            weights = apart if weights is None else [one * more for one, more in zip(weights, apart, strict=True)]
        advantages = fields_of(rows, "advantages")
        assert advantages is not None
        more = fields_of(rows, "logprobs"), fields_of(rows, "kl_weights"), entropies, divergences
        more = *more, fields_of(rows, "teacher_logprobs")
        return self.objective.loss(outputs, old, advantages, fields_of(rows, "ref_logprobs"), weights, *more)

    def variants(self) -> Iterator[tuple[str, StepFormula]]:
        own = self.objective

        def with_objective(**changes: Any) -> StepFormula:
            return replace(self, objective=replace(own, **changes))

        yield "the policy term has the wrong sign: it lowers the probability of good answers", with_objective(sign=-1)
        for name in ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"):
            if name != own.reduction and own.ratio != "sequence":
                yield f"the reduction is {name} and not {own.reduction}", with_objective(reduction=name)
        if own.surrogate in ("clip", "cispo"):
            yield "the ratio is not clipped", with_objective(clips=False)
            wider = {"clip_low": own.clip_high, "clip_high": own.clip_low}
            if own.clip_low != own.clip_high:
                yield "eps_clip and eps_clip_higher are exchanged", with_objective(**wider)
        if own.surrogate == "clip":
            text = "the clip takes the larger of the two objectives, the wrong side"
            yield text, with_objective(keeps_smaller=False)
            if own.dual_clip is not None:
                yield "the dual clip c_clip is left out", with_objective(dual_clip=None)
        if own.kl_coef:
            text = "the KL has the wrong sign: it drives the policy away from the reference"
            yield text, with_objective(kl_sign=-1)
            yield "the KL is left out", with_objective(kl_coef=0.0)
            for name in ("k1", "k2", "k3"):
                if name != own.kl_estimator:
                    yield f"the KL is estimated by {name} and not {own.kl_estimator}", with_objective(kl_estimator=name)
        levels = {"token": "of each token", "sequence": "of whole rows", "sequence_token": "of whole rows (GSPO-token)"}
        for name, text in levels.items():
            if name != own.ratio:
                yield f"the importance ratios are {text}", with_objective(ratio=name)
        if own.ratio != "token":
            yield "the log-ratios of a row are summed and not averaged", with_objective(sums_ratio=True)
        if own.entropy_coef:
            yield "the entropy bonus is left out", with_objective(entropy_coef=0.0)
            yield "the entropy bonus has the wrong sign", with_objective(entropy_coef=-own.entropy_coef)
        yield "the weights of the correction are left out", replace(self, is_weighted=False)
        if own.rlsd is not None or own.sdar is not None:
            yield "the signal of the teacher (actor.teacher_signal) is left out", with_objective(rlsd=None, sdar=None)
        yield from super().variants()


@dataclass(frozen=True, kw_only=True)
class PairFormula(StepFormula):
    objective: PairObjective

    def of_outputs(self, outputs: list[Tensor], rows: Sequence[TrainSequence], update: Update) -> Tensor:
        reference = fields_of(rows, "ref_logprobs")
        refs = (None, None) if reference is None else (reference[0::2], reference[1::2])
        return self.objective.loss(outputs[0::2], outputs[1::2], *refs)

    def variants(self) -> Iterator[tuple[str, StepFormula]]:
        def with_objective(**changes: Any) -> StepFormula:
            return replace(self, objective=replace(self.objective, **changes))

        yield "chosen and rejected answers are swapped", with_objective(is_swapped=True)
        if self.objective.smoothing:
            yield "label_smoothing is left out", with_objective(smoothing=0.0)
        if self.objective.kind in ("sigmoid", "robust", "ipo"):
            yield "the reference is left out", with_objective(uses_reference=False)
        for factor in (0.5, 2.0, 10.0, 0.1):
            yield f"beta is {self.objective.beta * factor:g}", with_objective(beta=self.objective.beta * factor)
        yield from super().variants()


@dataclass(frozen=True, kw_only=True)
class KTOFormula(StepFormula):
    beta: float
    weights: tuple[float, float]
    sign: int = 1

    def of_outputs(self, outputs: list[Tensor], rows: Sequence[TrainSequence], update: Update) -> Tensor:
        reference, point = fields_of(rows, "ref_logprobs"), update.loss_fn.keywords["reference_point"]  # type: ignore[attr-defined]
        assert reference is not None
        good = [(row.reward > 0.5) == (self.sign > 0) for row in rows]
        return formulas.kto_loss(outputs, reference, good, self.beta, point, self.weights)

    def variants(self) -> Iterator[tuple[str, StepFormula]]:
        yield "desirable and undesirable answers are swapped", replace(self, sign=-1)
        yield "desirable_weight and undesirable_weight are exchanged", replace(self, weights=self.weights[::-1])
        yield from super().variants()


@dataclass(frozen=True, kw_only=True)
class LikelihoodFormula(StepFormula):
    def of_outputs(self, outputs: list[Tensor], rows: Sequence[TrainSequence], update: Update) -> Tensor:
        return formulas.likelihood_loss(outputs)


@dataclass(frozen=True, kw_only=True)
class RankingFormula(StepFormula):
    margin_coef: float
    center_coef: float
    sign: int = 1

    def of_outputs(self, outputs: list[Tensor], rows: Sequence[TrainSequence], update: Update) -> Tensor:
        size = update.how.rows_per_unit
        present = [bool(mask_of(row).any()) for row in rows]
        starts = range(0, len(rows), size)
        units = [[index for index in range(start, start + size) if present[index]] for start in starts]
        scores = [row.sum() for row in outputs]
        levels = fields_of(rows, "returns")
        of_rows = None if levels is None else [float(row.sum()) for row in levels]
        ratings = [self.sign * row.reward for row in rows]
        return formulas.ranking_loss(scores, ratings, of_rows, units, self.margin_coef, self.center_coef)

    def variants(self) -> Iterator[tuple[str, StepFormula]]:
        yield "better and worse answers are swapped", replace(self, sign=-1)
        yield "the margins are left out", replace(self, margin_coef=0.0)
        yield "the scores are not centred", replace(self, center_coef=0.0)
        yield from super().variants()


@dataclass(frozen=True, kw_only=True)
class StepLabelFormula(StepFormula):
    is_inverted: bool = False

    def of_outputs(self, outputs: list[Tensor], rows: Sequence[TrainSequence], update: Update) -> Tensor:
        labels = fields_of(rows, "returns")
        assert labels is not None
        return formulas.step_loss(outputs, [1 - row for row in labels] if self.is_inverted else labels)

    def variants(self) -> Iterator[tuple[str, StepFormula]]:
        yield "right and wrong steps are swapped", replace(self, is_inverted=True)
        yield from super().variants()


@dataclass(frozen=True, kw_only=True)
class ValueFormula(StepFormula):
    clip_range: float
    coef: float
    clips: bool = True

    def of_outputs(self, outputs: list[Tensor], rows: Sequence[TrainSequence], update: Update) -> Tensor:
        old, returns = fields_of(rows, "values"), fields_of(rows, "returns")
        assert old is not None
        assert returns is not None
        return formulas.value_loss(outputs, old, returns, self.clip_range if self.clips else 1e9, self.coef)

    def variants(self) -> Iterator[tuple[str, StepFormula]]:
        yield "the values are not clipped", replace(self, clips=False)
        yield from super().variants()


@dataclass(frozen=True, kw_only=True)
class DistillFormula(StepFormula):
    """Distillation, alone or beside the loss of a policy algorithm."""

    policy: StepFormula | None
    rl_weight: float
    weight: float
    kind: str  # of the divergence, or "sampled_reverse_kl"
    jsd_beta: float
    discount: float
    role: str
    reads_prompt: bool = False  # one of its own, so that the rows have its log-probabilities of sampled tokens alone

    def loss(self, run: WatchedRun, weights: Weights, rows: Sequence[TrainSequence], update: Update) -> Tensor:
        model, found = run.models["actor"], []
        if self.kind == "sampled_reverse_kl":
            outputs = [self.outputs(model, weights, row) for row in rows]
            old, teacher = fields_of(rows, "old_logprobs"), fields_of(rows, "teacher_logprobs")
            assert teacher is not None
            old = [row.detach() for row in outputs] if old is None else old
            found = formulas.sampled_reverse_kl(outputs, old, teacher, self.discount)
        else:
            theirs, own = run.models[self.role], run.frozen[self.role]
            for row in rows:
                tokens, mask = np.asarray(row.tokens).tolist(), mask_of(row)[1:]
                student = model.log_distributions(weights, tokens, self.temperature)[mask]
                teacher = theirs.log_distributions(own, tokens, self.temperature)[mask].detach()
                found.append(formulas.divergence(student, teacher, self.kind, self.jsd_beta))
        loss = self.weight * torch.cat(found).mean()
        if self.policy is not None and self.rl_weight:
            loss = loss + self.rl_weight * self.policy.loss(run, weights, rows, update)
        return loss

    def variants(self) -> Iterator[tuple[str, StepFormula]]:
        yield "the loss of distillation has the wrong sign", replace(self, weight=-self.weight)
        if self.kind == "jsd" and self.jsd_beta != 0.5:
            text = "teacher and student are exchanged: the weight of the teacher is 1 - teacher.jsd_beta"
            yield f"{text}, {1 - self.jsd_beta:g}", replace(self, jsd_beta=1 - self.jsd_beta)
        for kind in ("forward_kl", "reverse_kl", "jsd"):
            if kind != self.kind and not self.reads_prompt:
                yield f"the divergence is {kind} and not {self.kind}", replace(self, kind=kind)
        if self.policy is not None:
            for text, other in self.policy.variants():
                yield text, replace(self, policy=other)
        if self.temperature != 1:
            yield "the distributions are at temperature 1", replace(self, temperature=1.0)


def formula_of(config: Any, update: Update) -> StepFormula:
    """Return the formula of an update. Raises NotChecked for a loss or a setting without a formula."""
    if update.role == "critic":
        critic = config.critic
        return ValueFormula(clip_range=critic.eps_clip, coef=critic.value_loss_coef)
    if config.actor.router_aux_loss_coef:
        raise NotChecked("actor.router_aux_loss_coef adds a loss of the router, which no formula here has")
    own = _own_formula(config, update)
    teacher = config.teacher if isinstance(config, PolicyExperimentConfig) else None
    if teacher is None:
        assert own is not None
        return own
    has_own = teacher.prompt_key is not None or teacher.by is not None or teacher.follows_actor
    if has_own and teacher.divergence is not None:
        raise NotChecked(
            "a divergence with teacher.prompt_key, teacher.by or teacher.follows_actor has no formula here"
        )
    if teacher.prefix_weight:
        raise NotChecked("teacher.prefix_weight has no formula here")
    return DistillFormula(
        temperature=update.how.sampling.logprob_temperature,
        policy=own,
        rl_weight=teacher.rl_loss_weight,
        weight=teacher.distill_loss_weight,
        kind=teacher.loss_type,
        jsd_beta=teacher.jsd_beta,
        discount=teacher.kl_discount,
        role=teacher.role,
        reads_prompt=has_own,
    )


_KNOWN = {"clip_eps", "clip_eps_higher", "c_clip", "kl_coef", "kl_estimator", "surrogate", "mask", "entropy_coef"}
_KNOWN |= {
    "teacher_signal",
    "reduction",
    "norm_length",
    "importance_sampling_level",
    "prox_logp_method",
    "sapo_tau_pos",
    "sapo_tau_neg",
}


def _own_formula(config: Any, update: Update) -> StepFormula | None:
    actor, loss_fn = config.actor, type(config).loss_fn
    how: dict[str, Any] = {"temperature": update.how.sampling.logprob_temperature}
    if loss_fn is gspo.GSPOConfig.loss_fn:
        return _policy(actor, PolicyObjective(ratio="sequence", **_policy_settings(actor)), **how)
    if loss_fn in (grpo.GRPOConfig.loss_fn, ppo.PPOConfig.loss_fn):
        if actor.surrogate not in _SURROGATES:
            raise NotChecked(f"actor.surrogate={actor.surrogate} has no formula here")
        if actor.mask not in (None, *_MASKS):
            raise NotChecked(f"actor.mask={actor.mask} has no formula here")
        if actor.teacher_signal not in (None, "rlsd", "sdar"):
            raise NotChecked(f"actor.teacher_signal={actor.teacher_signal} has no formula here")
        keywords = update.loss_fn.keywords  # type: ignore[attr-defined]
        if isinstance(inner := keywords.get("policy_loss_fn"), partial):  # beside the loss of distillation
            keywords = inner.keywords
        if unknown := [name for name, value in keywords.items() if value and name not in _KNOWN]:
            raise NotChecked(f"the settings {', '.join(unknown)} of the loss have no formula here")
        settings = _policy_settings(actor) | _surrogate_settings(actor.surrogate, actor.chosen_surrogate)
        settings |= {"surrogate": actor.surrogate, "reduction": actor.reduction}
        if actor.teacher_signal is not None:
            own = vars(actor)[actor.teacher_signal]
            settings[actor.teacher_signal] = (
                (own.mix, own.eps) if actor.teacher_signal == "rlsd" else (own.coef, own.beta)
            )
        bonus = actor.entropy_bonus
        adapts = bonus is not None and bonus.target is not None
        settings["entropy_coef"] = (keywords.get("entropy_coef") if adapts else bonus and bonus.coef) or 0.0
        if (mask := actor.mask_settings()["mask"]) is not None:
            settings["keep"] = formulas.keep_function(actor.mask, mask)
            how["divergence"] = mask.divergence
        ratio = "sequence_token" if actor.importance_sampling_level == "sequence" else "token"
        norm_length = float(config.gconfig.max_new_tokens)
        return _policy(actor, PolicyObjective(ratio=ratio, norm_length=norm_length, **settings), **how)
    if loss_fn in (dpo.DPOConfig.loss_fn, online_dpo.OnlineDPOConfig.loss_fn):
        chosen = {"kind": actor.loss_type, "beta": actor.beta, "smoothing": actor.label_smoothing}
        return PairFormula(objective=PairObjective(**chosen, gamma=actor.simpo_gamma), **how)
    if loss_fn is kto.KTOConfig.loss_fn:
        return KTOFormula(beta=actor.beta, weights=(actor.desirable_weight, actor.undesirable_weight))
    if loss_fn is sft.SFTConfig.loss_fn:
        return LikelihoodFormula()
    if loss_fn is rw.RewardModelConfig.loss_fn:
        return RankingFormula(margin_coef=actor.margin_coef, center_coef=actor.center_coef)
    if loss_fn is prm.ProcessRewardConfig.loss_fn:
        return StepLabelFormula()
    if loss_fn is distill.DistillConfig.loss_fn:
        return None
    raise NotChecked(f"{type(config).__name__} has a loss of its own, for which there is no formula here")


_SURROGATES = ("clip", "unclipped", "reinforce", "cispo", "sapo", "gmpo", "vespo", "fipo")
_MASKS = ("dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl", "prime_ipo", "sao")


def _surrogate_settings(name: str, own: Any) -> dict[str, Any]:
    if name == "sapo":
        return {"tau": (own.sapo_tau_pos, own.sapo_tau_neg)}
    if name == "gmpo":
        return {"log_clip": own.log_clip}
    if name == "vespo":
        return {"vespo": (own.k_pos, own.lambda_pos, own.k_neg, own.lambda_neg)}
    if name == "fipo":
        return _clips(own) | {"fipo": (own.half_life, own.weight_low, own.weight_high, own.cap_ratio)}
    return {}


def _clips(own: Any) -> dict[str, Any]:
    higher = own.eps_clip if own.eps_clip_higher is None else own.eps_clip_higher
    return {"clip_low": own.eps_clip, "clip_high": higher, "dual_clip": own.c_clip}


def _policy_settings(actor: Any) -> dict[str, Any]:
    return _clips(actor) | {
        "kl_coef": 0.0 if actor.use_kl_in_reward else actor.kl_ctl,
        "kl_estimator": actor.kl_estimator,
    }


def _policy(actor: Any, objective: PolicyObjective, **how: Any) -> PolicyFormula:
    interpolates = actor.prox_logp_method == "loglinear"
    return PolicyFormula(
        objective=objective, from_rollout=not actor.recompute_logprob, interpolates=interpolates, **how
    )


def loss_and_gradient(
    formula: StepFormula, run: WatchedRun, weights: Weights, rows: Sequence[TrainSequence], update: Update
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of the formula, and its gradient by autograd with respect to each weight."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    loss = formula.loss(run, leaves, rows, update)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    slopes = {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(leaves.items(), found, strict=True)
    }
    return float(loss.detach()), slopes


def relative_difference(found: Weights, expected: Weights) -> float:
    """Return |found - expected| / |expected| over all weights."""
    apart = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    whole = sum(float(expected[name].square().sum()) for name in expected)
    return (apart / whole) ** 0.5 if whole else (0.0 if not apart else float("inf"))
