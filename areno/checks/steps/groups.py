"""Checks of which samples a step draws, and which of them it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from areno.checks.inputs.findings import Finding, green, red
from areno.checks.steps.policy_rows import StepRows, sampled_steps
from areno.checks.steps.two_steps import TwoSteps, of_two_steps
from areno.types import ScoredSample

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

_ENOUGH = 32  # rows: with fewer, a step may have the few that an epoch leaves


def sampled_groups(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether each step draws as many samples of as many prompts as the settings say."""
    config, steps = found.run.config, list(sampled_steps(found.run))
    if not steps:
        return
    size, n_rows = config.train_dataset.batch_size, sum(len(dataset.loader.rows) for dataset in subject.training_rows)
    is_full = n_rows >= _ENOUGH and not (config.rollout.dynamic_sampling or config.prompts_ahead)
    for step in steps:
        groups, where = _groups(step), f"step {step.update.step}"
        for own in groups.values():
            wanted, items = config.n_samples_of(own[0].item.source), {sample.item.index for sample in own}
            if len(own) != wanted:
                yield red(
                    "sampled-groups", f"{where} has {len(own)} samples of a prompt, not {wanted} (gconfig.n_samples)"
                )
                return
            if len(items) > 1:
                yield red("sampled-groups", f"{where} has a group with samples of rows {sorted(items)}")
                return
        if is_full and len(groups) != size:
            text = f"{where} has samples of {len(groups)} prompts, and train_dataset.batch_size is {size} here"
            yield red("sampled-groups", text)
            return
    yield green("sampled-groups", f"each step has {size} prompts, each with as many samples as gconfig says")


def trained_groups(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether each step trains exactly the groups that dynamic sampling keeps, or all of them."""
    n_dropped, config, name = 0, found.run.config, "trained-groups"
    steps = list(sampled_steps(found.run))
    if not steps:  # of SFT, say
        return
    for step in steps:
        if any(sample is None for sample in step.samples):
            return  # see training-rows
        groups, where = _groups(step), f"step {step.update.step}"
        kept, has_signal = _kept(step, groups), {group for group, own in groups.items() if _differ(step, own)}
        trained = {sample.group for sample in step.samples if sample is not None}
        n_dropped += len(groups) - len(kept)
        if config.rollout.dynamic_sampling and has_signal and (wrong := trained - has_signal):
            text = (
                f"{where} trains {len(wrong)} groups whose rewards are all equal, which rollout.dynamic_sampling drops"
            )
            yield red(name, text)
            return
        if config.replaces_in_flight:
            continue  # groups are taken in the order in which they end
        if step.update.how.rows_per_unit == 2:
            kept &= trained  # those without a pair are left out
        if trained != kept:
            text = f"{where} trains groups {sorted(trained)} of {sorted(groups)}, and by the settings {sorted(kept)}"
            yield red(name, text)
            return
        rows = {id(sample) for sample in step.samples}
        lost = [x for group in kept for x in groups[group] if x.outcome.value is not None and id(x) not in rows]
        if lost and step.update.how.rows_per_unit == 1:
            yield red(name, f"{where} leaves out {len(lost)} samples of groups that are trained")
            return
    if config.rollout.dynamic_sampling:
        yield green(name, f"the groups that dynamic sampling keeps are trained, and none of the {n_dropped} others")
    else:
        yield green(name, "all samples with a reward are trained")


def _groups(step: StepRows) -> dict[int, list[ScoredSample]]:
    found: dict[int, list[ScoredSample]] = {}
    for sample in step.run.samples[step.update.step]:
        found.setdefault(sample.group, []).append(sample)
    return found


def _differ(step: StepRows, group: list[ScoredSample]) -> bool:
    return len({step.raw_reward(sample) for sample in group if sample.outcome.value is not None}) > 1


def _kept(step: StepRows, groups: dict[int, list[ScoredSample]]) -> set[int]:
    """Return the groups that the settings keep: with dynamic sampling, the first ones whose rewards differ."""
    config = step.run.config
    known = [group for group in sorted(groups) if any(x.outcome.value is not None for x in groups[group])]
    if not config.rollout.dynamic_sampling:
        return set(known)
    with_signal = [group for group in known if _differ(step, groups[group])]
    return set((with_signal or known)[: config.train_dataset.batch_size])


CHECKS = [of_two_steps(check) for check in (sampled_groups, trained_groups)]
