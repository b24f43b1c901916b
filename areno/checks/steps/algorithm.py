"""Checks of the algorithm, on two steps of the run with a small model: what its rows hold, and what an update does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areno.checks.formulas.advantage_formulas import Norm
from areno.checks.inputs.findings import Finding, NotChecked, green, not_checked, red
from areno.checks.steps.model_numbers import LOGPROB_ERROR, largest_distance, sampling_temperature, shifted_rows
from areno.checks.steps.policy_rows import StepRows, sampled_steps
from areno.checks.steps.probes import match_rows, seen_rows
from areno.checks.steps.step_formula import (
    DistillFormula,
    KTOFormula,
    LikelihoodFormula,
    PairFormula,
    PolicyFormula,
    RankingFormula,
    StepLabelFormula,
    field_of,
    formula_of,
    mask_of,
)
from areno.checks.steps.two_steps import TwoSteps, of_two_steps
from areno.checks.steps.watched_run import Update, WatchedRun
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.ratio import RatioConfig
from areno.types import TrainSequence

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

_REWARD_ERROR = 1e-5
_NO_CHANCE = 1e-6  # that samples are equal

Row = np.ndarray


def training_rows(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether each row that is trained is a prompt with its own completion, and only the completion is trained."""
    steps, wrong = list(sampled_steps(found.run)), list[Finding]()
    if not steps:
        return
    for step in steps:
        for number, (row, sample) in enumerate(zip(step.rows, step.samples, strict=True)):
            if sample is None:
                wrong.append(red("training-rows", f"row {number} of step {step.update.step} is no sample of this step"))
                break
            trained, wanted = mask_of(row).numpy(), step.wanted_mask(number)
            if step.is_agents(number):
                if fault := _agent_row_fault(step, number):
                    wrong.append(red("training-rows", f"row {number} of step {step.update.step} {fault}"))
                    break
                if step.run.config.agent.train_tool_results:
                    trained = trained & wanted  # what else is trained is the text of tools
            if not np.array_equal(trained, wanted) and not (
                _may_reject(step.run.config) and not trained[~wanted].any()
            ):
                text = _describe_mask(trained, wanted, f"row {number}")
                setting = "actor.mask_no_eos_with_zero"
                if step.is_left_out(number):
                    text = f"row {number} was cut off at gconfig.max_new_tokens, and is trained in spite of {setting}"
                elif not trained.any():
                    text = f"row {number} of step {step.update.step} is not trained, and {setting} is not why"
                wrong.append(red("loss-mask", text))
                break
    if not wrong and found.run.episodes.turns:
        yield from _turns_found(steps)
    elif not wrong:
        yield green("training-rows", "each row is a prompt with its own completion")
    yield from wrong


def _may_reject(config: Any) -> bool:
    """Whether a correction may leave tokens out whose policy differs between rollout and training."""
    return isinstance(config.actor, RatioConfig) and config.actor.rejection_sampling is not None


def _agent_row_fault(step: StepRows, number: int) -> str:
    """Say why a row is not what the model read and wrote in the turns of an agent, or ""."""
    n_tokens, turns = len(step.rows[number].tokens), step.turns_of(number)  # type: ignore[arg-type]
    end = max((turn.span.stop for turn in turns), default=0)
    if not turns:
        return "does not begin with what the model read and wrote in a request of the agent"
    return f"has {n_tokens - end} tokens after what the model wrote last" if end < n_tokens else ""


def _turns_found(steps: Sequence[StepRows]) -> Iterator[Finding]:
    """Say how many turns the rows of agents have. One turn does not show that the text between turns is not trained."""
    counts = [len(step.turns_of(row)) for step in steps for row in range(len(step.rows)) if step.is_agents(row)]
    n_episodes = sum(len(step.members) for step in steps)
    lost = [sample for step in steps for sample in step.run.samples[step.update.step] if not sample.is_done]
    text = (
        f"the {sum(len(step.rows) for step in steps)} rows of {n_episodes} episodes hold what the model read and wrote"
    )
    details = [f"{len(lost)} agents failed, the first: {lost[0].outcome.message}"] if lost else []
    yield green("training-rows", text, details)
    if counts and max(counts) > 1:
        many = sum(count > 1 for count in counts)
        yield green(
            "agent-turns",
            f"{many} rows have several turns, at most {max(counts)}; only what the model wrote is trained",
        )
    elif counts:
        why = "no row of an episode has several turns here: its agent sent one request, or a small model calls no tool"
        yield not_checked("agent-turns", why)


def loss_mask(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the loss depends on the trained tokens of each row, all of them and no others."""
    wrong, n_tokens = list[Finding](), 0
    for update in found.run.updates:
        for number, (row, seen) in enumerate(seen_rows(update)):
            wanted = mask_of(row).numpy()
            what = f"row {number} of update {update.step} of the {update.role}"
            if not np.array_equal(seen.trained, wanted):
                wrong.append(red("loss-mask", _describe_mask(seen.trained, wanted, what)))
                break
            if seen.slopes[~wanted].any():
                n = int(np.count_nonzero(seen.slopes[~wanted]))
                wrong.append(red("loss-mask", f"{what}: {n} tokens that are not trained have a gradient"))
                break
            n_tokens += int(wanted.sum())
    yield from wrong or [
        green("loss-mask", f"the loss has a gradient to the {n_tokens} trained tokens and to no other")
    ]


def _describe_mask(found: Row, wanted: Row, what: str) -> str:
    for shift, word in ((1, "later"), (-1, "earlier")):
        if np.array_equal(found[1:-1], np.roll(wanted, shift)[1:-1]):
            return f"{what}: the loss mask is shifted by one: it begins and ends one token {word} than the completion"
    if found.any() and wanted.any() and found[::-1].argmax() == wanted[::-1].argmax():
        late = int(found.argmax()) - int(wanted.argmax())
        if late > 0 and np.array_equal(found[found.argmax() :], wanted[found.argmax() :]):
            return f"{what}: the loss mask begins late: the first {late} tokens of the completion are not trained"
        if late < 0 and np.array_equal(found[wanted.argmax() :], wanted[wanted.argmax() :]):
            return f"{what}: the loss mask begins early: {-late} tokens before the completion are trained"
    more, fewer = int((found & ~wanted).sum()), int((wanted & ~found).sum())
    ends = np.flatnonzero(wanted)
    if more and not fewer and len(ends) and np.flatnonzero(found & ~wanted)[0] > ends[-1]:
        return f"{what}: {more} tokens after the end of the completion are trained, such as padding"
    return f"{what}: the loss mask trains {more} tokens that it should not, and leaves out {fewer} that it should train"


# -- rewards and advantages ------------------------------------------------------------------------------------------


def row_rewards(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether each row has the reward of its own completion, shaped as the settings say."""
    steps, wrong = list(sampled_steps(found.run)), list[Finding]()
    if not steps:
        return
    for step in steps:
        wanted, given = step.rewards(), [row.reward for row in step.rows]
        if max(abs(one - other) for one, other in zip(given, wanted, strict=True)) > _REWARD_ERROR:
            text = f"the rewards of step {step.update.step} are not those of their completions"
            if np.allclose(sorted(given), sorted(wanted), atol=_REWARD_ERROR):
                text += ": they are those of other rows"
            elif np.allclose(given, -np.array(wanted), atol=_REWARD_ERROR):
                text += ": they have the wrong sign"
            elif np.allclose(given, step.raw_rewards(), atol=_REWARD_ERROR):
                text += ": actor.reward_bias, reward_scaling, reward_clip or the overlong penalty are left out"
            wrong.append(red("row-rewards", text))
            break
    yield from wrong or [
        green("row-rewards", "each row has the reward of its own completion (a stand-in that differs)")
    ]


def advantages(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether advantages and returns are those of the formula, from the rewards of the step."""
    wrong = list[Finding]()
    steps = [step for step in sampled_steps(found.run) if step.has_advantages]
    if not steps:
        if found.probes["actor"].policy_term is not None:
            yield not_checked("advantages", "the algorithm computes advantages of its own, with no formula here")
        return
    if subject.algorithm.advantage_fn is not None:
        raise NotChecked("the advantages are those of a function of the user")
    for step in steps:
        given = [field_of(row, "advantages").numpy() for row in step.rows]
        wanted, returns = step.advantages()
        if largest_distance(given, wanted) > LOGPROB_ERROR * max(1.0, _largest(wanted)):
            wrong.append(red("advantages", _describe_advantages(step, given, wanted)))
        elif returns is not None:
            targets = [field_of(row, "returns").numpy() for row in step.rows]
            if largest_distance(targets, returns) > LOGPROB_ERROR * max(1.0, _largest(returns)):
                text = f"the returns of step {step.update.step} are not advantages plus values"
                shifted = shifted_rows(returns, targets, 1), shifted_rows(returns, targets, -1)
                if any(largest_distance(targets, each) <= LOGPROB_ERROR for each in shifted):
                    text += ": they are off by one token"
                wrong.append(red("returns", text))
    yield from wrong[:1] or [green("advantages", "advantages are those of the formula, from the step's own rewards")]


def _describe_advantages(step: StepRows, given: list[Row], wanted: list[Row]) -> str:
    text = f"the advantages of step {step.update.step} are not those of the formula"
    means, expected = [[float(row.mean()) for row in rows if len(row)] for rows in (given, wanted)]
    for reason, other in step.other_advantages():
        if largest_distance(given, other) <= LOGPROB_ERROR * max(1.0, _largest(other)):
            return f"{text}: {reason}"
    if np.allclose(means, -np.array(expected), atol=1e-3):
        return f"{text}: they have the wrong sign"
    if np.allclose(sorted(means), sorted(expected), atol=1e-3):
        return f"{text}: they are those of other rows or groups"
    return f"{text}, by up to {largest_distance(given, wanted):.2g}"


def _largest(rows: Sequence[Row]) -> float:
    return max((float(np.abs(row).max()) for row in rows if len(row)), default=0.0)


def samples_differ(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the samples of a prompt are drawn one by one: equal ones of a small probability are copies."""
    run, n_groups = found.run, 0
    if fault := _repeated_seeds(run):
        yield red("samples-differ", fault)
        return
    if run.config.gconfig.is_greedy if isinstance(run.config, PolicyExperimentConfig) else True:
        return
    for step, samples in run.samples.items():
        groups: dict[int, list[Any]] = {}
        for sample in samples:
            if sample.trajectory is None:
                groups.setdefault(sample.group, []).append(sample.sequence)
        for group in groups.values():
            texts = {tuple(map(int, each.resp_tokens)) for each in group}
            chance = math.exp(float(np.sum(group[0].resp_logprobs))) ** (len(group) - 1)
            n_groups += len(group) > 1
            if len(group) > 1 and len(texts) == 1 and chance < _NO_CHANCE:
                text = f"in step {step}, all {len(group)} samples of a prompt are equal, by chance of {chance:.1g}"
                yield red("samples-differ", f"{text}: they are drawn with the same random numbers")
                return
    if n_groups:
        yield green("samples-differ", "the samples of a prompt are drawn one by one")


def _repeated_seeds(run: WatchedRun) -> str:
    """Say which prompts are sampled with the random numbers of others, or ""."""
    config = run.config
    if not isinstance(config, PolicyExperimentConfig) or config.prompts_ahead or config.replaces_in_flight:
        return ""  # requests that wait for a later step keep their seeds
    known = dict[int, int]()
    for step, seeds in run.seeds.items():
        for seed in seeds:
            if seed in known:
                return f"prompts of steps {known[seed]} and {step} are sampled with the same random numbers"
            known[seed] = step
    return ""


def equal_rewards(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether rewards that are all equal train nothing: the gradient of the policy term is exactly 0."""
    probe = found.probes["actor"].equal_rewards
    if probe is None:
        return
    if _baseline(found.run.config) is None:
        raise NotChecked("actor.adv_norm subtracts no mean, so equal rewards are a signal")
    advantages = np.concatenate([field_of(row, "advantages").numpy() for row in probe.rows])
    slopes = np.concatenate([seen.slopes for seen in probe.seen])
    if advantages.any():
        yield red("equal-rewards", f"with equal rewards, advantages are up to {np.abs(advantages).max():.2g}, not 0")
    elif slopes.any():
        yield red("equal-rewards", f"with equal rewards, the policy term has slopes up to {np.abs(slopes).max():.2g}")
    else:
        yield green("equal-rewards", "with equal rewards, the gradient of the policy term is exactly 0")


def _baseline(config: Any) -> Norm | None:
    norm = Norm.of(config.actor.adv_norm)
    return None if norm is None or norm.mean is None else norm


# -- directions ------------------------------------------------------------------------------------------------------


def slope_signs(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the loss falls where the probability of a token with a positive advantage rises."""
    probe = found.probes["actor"].policy_term
    if probe is None:
        return
    rows = zip(probe.rows, match_rows(probe.rows, probe.seen), strict=True)
    pairs = [(_weighted_advantages(row), seen.slopes[mask_of(row).numpy()]) for row, seen in rows]
    values, slopes = (np.concatenate(each) for each in zip(*pairs, strict=True))
    wrong = np.sign(slopes) != -np.sign(values)
    if wrong.any():
        n, same = int(wrong.sum()), bool((np.sign(slopes) == np.sign(values)).all())
        text = f"the slope of the loss has not the sign of -A at {n} of {len(wrong)} trained tokens"
        yield red("slope-signs", f"{text}: it has the wrong sign everywhere" if same else text)
    else:
        yield green("slope-signs", f"the slope of the loss has the sign of -A at all {len(wrong)} trained tokens")


def _weighted_advantages(row: TrainSequence) -> Row:
    """Return the advantage of each trained token, 0 where a selection or correction leaves the token out."""
    found = field_of(row, "advantages").numpy()
    return found if row.weights is None else found * field_of(row, "weights").numpy()


def small_step(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether a small step against the gradient moves what the algorithm should move, by transformers."""
    run, [update, *_] = found.run, found.run.of()
    if isinstance(formula_of(run.config, update), DistillFormula):
        return  # its goal is its loss
    name, what, weights = _goal(found, update)
    model, leaves = run.models["actor"], {key: value.double().requires_grad_() for key, value in update.before.items()}
    temperature, total = sampling_temperature(run.config), torch.zeros((), dtype=torch.float64)
    for row, weight in zip(update.given, weights, strict=True):
        tokens = np.asarray(row.tokens).tolist()
        outputs = model.logprobs(leaves, tokens, temperature) if model.head == "lm" else model.values(leaves, tokens)
        total = total + (outputs[mask_of(row)] * torch.as_tensor(weight)).sum()
    slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    rises = -sum(
        float((slope * update.gradient[key].double()).sum())
        for key, slope in zip(leaves, slopes, strict=True)
        if slope is not None
    )
    if not rises and run.has_equal_samples(update.step):
        raise NotChecked("the model here draws the same sample for a prompt each time, which trains nothing")
    verb = "rises" if rises > 0 else "falls" if rises < 0 else "does not change"
    yield (green if rises > 0 else red)(name, f"after a small step against the gradient, {what} {verb}")


def _goal(found: TwoSteps, update: Update) -> tuple[str, str, list[Row]]:
    """Return (name, text, weight of each trained token): their weighted sum should rise."""
    formula, rows = formula_of(found.run.config, update), update.given
    ones = [np.ones(int(mask_of(row).sum())) for row in rows]
    if isinstance(formula, PolicyFormula):
        objective = formula.objective
        if objective.kl_coef and objective.kl_estimator == "k1":
            raise NotChecked("the gradient of the estimator k1 is noise, which may be larger than the policy term")
        by_row = objective.ratio == "sequence" or objective.reduction == "seq_mean_token_mean"
        values = [_weighted_advantages(row) for row in rows]
        return "advantage-ascent", "sum A log p", [row / (len(row) or 1 if by_row else 1) for row in values]
    if isinstance(formula, PairFormula):
        share = [row / len(row) if formula.objective.is_per_token else row for row in ones]
        signs = [row * (1 if number % 2 == 0 else -1) for number, row in enumerate(share)]
        return "pair-margin", "the margin of chosen over rejected answers", signs
    if isinstance(formula, KTOFormula):
        how = formula.weights
        signs = [row * (how[0] if each.reward > 0.5 else -how[1]) for row, each in zip(ones, rows, strict=True)]
        return "label-margin", "the log-probability of desirable over undesirable answers", signs
    if isinstance(formula, LikelihoodFormula):
        return "likelihood", "the log-likelihood of the trained tokens", ones
    if isinstance(formula, StepLabelFormula):
        return (
            "label-margin",
            "the score of right over wrong steps",
            [2 * field_of(row, "returns").numpy() - 1 for row in rows],
        )
    if isinstance(formula, RankingFormula):
        size, signs = update.how.rows_per_unit, []
        for number, row in enumerate(rows):
            unit = rows[number // size * size : number // size * size + size]
            wins = sum(np.sign(row.reward - other.reward) for other in unit if mask_of(other).any())
            signs.append(ones[number] * wins)
        return "pair-margin", "the score of better over worse answers", signs
    raise NotChecked("the loss has no goal that a sum over tokens tells")


def pairs(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the first of two samples that are trained as a pair has the higher reward, for the same prompt."""
    steps = [step for step in sampled_steps(found.run) if step.update.how.rows_per_unit == 2]
    if not steps:
        return
    for step in steps:
        rewards = step.rewards()
        groups = [sample.group if sample else -1 for sample in step.samples]
        for first in range(0, len(rewards), 2):
            if rewards[first] <= rewards[first + 1]:
                yield red("pairs", f"pair {first // 2}: the chosen sample has a lower reward than the rejected one")
                return
            if groups[first] != groups[first + 1]:
                yield red("pairs", f"pair {first // 2} has samples of two prompts")
                return
    yield green("pairs", "the chosen sample of each pair has the higher reward, and both answer the same prompt")


CHECKS = [
    of_two_steps(check)
    for check in (
        training_rows,
        loss_mask,
        row_rewards,
        samples_differ,
        advantages,
        equal_rewards,
        slope_signs,
        small_step,
        pairs,
    )
]
