"""Checks that run a few steps on the small model, with the user's data and settings."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.api.trainer import Trainer
from areno.checks.inputs import varied_reward
from areno.checks.inputs.findings import Finding, NotChecked, green, not_checked, red
from areno.checks.inputs.subject import Subject
from areno.checks.steps.two_steps import given_rows, refused_short_run, short_rows, shorter_samples
from areno.config.policy_experiments import CriticExperimentConfig, PairedPolicyExperimentConfig, PolicyExperimentConfig
from areno.data.encode import decode_all
from areno.errors import ConfigError
from areno.run.resume import STATE
from areno.run.states import StateFolder
from areno.scoring.pool import RewardPool
from areno.scoring.records import record_of_completion
from areno.tracking.reader import RunReader
from areno.types import PromptItem, SamplingParams

_STEPS = 4
_ROWS = 2  # prompts or rows of a step
_SAMPLES = 4  # of a prompt
_TOKENS = 8  # of a completion
_GROUPS, _LEAST_GROUPS = 32, 4  # in which a signal is looked for
_SECONDS = 30.0  # of sampling groups
_TRIED_TOKENS = 8  # of each sample, to measure how fast they are
_CLOCKS = ("time", "memory", "per_second")  # in names of metrics that differ from run to run


def resume(subject: Subject) -> Iterator[Finding]:
    """Compare four steps with two steps, a state, and two steps that resume from it."""
    config = subject.config
    if isinstance(config, PolicyExperimentConfig) and (config.agent.fn is not None or config.train_dataset.sources):
        raise NotChecked("agents ask for samples when their own code does, so that two runs differ")
    whole, resumed = subject.folder / "whole", subject.folder / "resumed"
    _train(subject, whole)
    shutil.copytree(whole, resumed, symlinks=True)
    states = StateFolder(resumed / STATE, keep=2)
    states.remove(_STEPS)
    states.set_finished(None)
    _train(subject, resumed)
    faults = [*_different_files(whole, resumed), *_different_metrics(whole, resumed)]
    text = f"{_STEPS // 2} steps and {_STEPS // 2} steps that resume from their state"
    if faults:
        yield red("resume", f"{text} do not equal {_STEPS} steps", faults[:5])
    else:
        yield green("resume", f"{text} equal {_STEPS} steps, to the bit")


def groups_with_signal(subject: Subject) -> Iterator[Finding]:
    """Sample groups of completions, and count those whose rewards differ."""
    name, config = "group-signal", subject.config
    if not isinstance(config, PolicyExperimentConfig) or config.reward.fn is None or config.gconfig.n_samples < 2:
        return
    if config.agent.fn is not None:
        raise NotChecked("agents give the samples")
    if config.reward.has_model:
        yield not_checked(name, "a model gives a part of the reward")
        return
    if not subject.has_own_model:
        yield not_checked(name, "a random model answers at random; --model real samples from the run's own model")
        return
    dataset = subject.training_rows[0]
    items = [row.item for row in subject.sample_of(dataset, _GROUPS) if row.item is not None][:_GROUPS]
    n_samples, most = config.gconfig.n_samples, config.gconfig.max_new_tokens
    samples, n_tokens = _sample_in_time(subject, config, items)
    records = []
    for item, sequences in zip(items, samples, strict=False):  # as many as there was time for
        texts = decode_all(subject.tokenizer, sequences, skip_special_tokens=config.gconfig.skip_special_tokens)
        rendered = decode_all(subject.tokenizer, sequences, skip_special_tokens=False)
        records += [
            record_of_completion(item, ids, [0.0] * len(ids), text, whole, step=0)
            for ids, text, whole in zip(sequences, texts, rendered, strict=True)
        ]
    subject.doing = f"the rewards of {len(records)} samples"
    with RewardPool(config.reward) as pool:
        outcomes = pool.compute_outcomes(records)
    values = [outcome.value for outcome in outcomes]
    groups = [set(values[start : start + n_samples]) - {None} for start in range(0, len(values), n_samples)]
    n_signals = sum(len(group) > 1 for group in groups)
    text = f"{n_signals} of {len(groups)} groups of {n_samples} samples have different rewards"
    is_cut = any(len(ids) >= n_tokens for sequences in samples for ids in sequences) and n_tokens < most
    if is_cut:
        text += f", cut at {n_tokens} tokens, as sampling {most} (gconfig.max_new_tokens) takes too long here"
    elif len(groups) < len(items):
        text += f", of {len(items)} that would take too long here"
    if not n_signals and (is_cut or len(groups) < len(items)):
        yield not_checked(name, text)
    else:
        yield (green if n_signals else red)(name, f"{text}; only those train the policy")


def _sample_in_time(
    subject: Subject, config: PolicyExperimentConfig, items: Sequence[PromptItem]
) -> tuple[list[list[list[int]]], int]:
    """Sample groups for some seconds at most: of fewer prompts, and if this is not enough, of fewer tokens.

    Return the tokens of the samples of each group, and the largest number of tokens of a sample.
    """
    params, n_samples = SamplingParams.of(config.gconfig), config.gconfig.n_samples
    prompts = [item.tokens for item in items]
    few, most = prompts[:_LEAST_GROUPS], params.max_new_tokens
    n_tried = min(_TRIED_TOKENS, most)
    short = replace(params, max_new_tokens=n_tried, min_new_tokens=min(params.min_new_tokens, n_tried), ignore_eos=True)
    subject.doing = "a few tokens of samples, to measure how fast they are"
    trainer = Trainer.from_plan(subject.plan)
    try:
        trainer.init()
        seconds = math.inf
        for _ in range(2):  # the first is slower
            started = time.monotonic()
            with trainer.rollout_session(sampling_params=short, proxy=False):
                trainer.rollout_token_batch(few, n_samples, short, seed=config.seed)
            seconds = min(seconds, time.monotonic() - started)
        n_affordable = _SECONDS * n_tried * len(few) / max(seconds, 1e-3)  # tokens of one sample of each prompt
        n_groups = min(len(prompts), max(len(few), int(n_affordable / most)))
        n_tokens = max(n_tried, min(most, int(n_affordable / n_groups)))
        params = replace(params, max_new_tokens=n_tokens, min_new_tokens=min(params.min_new_tokens, n_tokens))
        subject.doing = f"{n_groups} groups of {n_samples} samples of at most {n_tokens} tokens"
        with trainer.rollout_session(sampling_params=params, proxy=False):
            found = trainer.rollout_token_batch(prompts[:n_groups], n_samples, params, seed=config.seed)
    finally:
        trainer.close()
    return [[list(each.resp_tokens) for each in result.sequences] for result in found], n_tokens


def _train(subject: Subject, folder: Path) -> None:
    logger = logging.getLogger("areno")
    level = logger.level
    logger.setLevel(logging.ERROR)  # warnings about so short a run are not about the user's
    try:
        with subject.algorithm.trainer(_short_config(subject), folder, train_dataset=short_rows(subject)) as trainer:
            trainer.fit()
    finally:
        logger.setLevel(level)


def _short_config(subject: Subject) -> Any:
    config, n_rows = subject.config, min(_ROWS, subject.config.train_dataset.batch_size)
    changes: dict[str, Any] = {"total_train_steps": _STEPS, "total_train_n_seqs": None, "total_train_epochs": 1000}
    changes |= given_rows("train_dataset")
    changes |= {"recover": {"mode": "auto", "freq_steps": _STEPS // 2, "freq_secs": None, "freq_epochs": None}}
    if isinstance(config, PolicyExperimentConfig):
        n_samples = min(_SAMPLES, config.gconfig.n_samples)
        if isinstance(config, PairedPolicyExperimentConfig):
            n_samples = max(n_samples, 2 * config.pairs_per_prompt)
        changes |= shorter_samples(config, n_samples, _TOKENS)
        changes["total_train_n_tokens"] = None
        n_batches = config.actor.ppo_n_minibatches
        if isinstance(config, CriticExperimentConfig):
            n_batches = math.lcm(n_batches, config.critic.ppo_n_minibatches)
        if n_rows * n_samples % n_batches:
            n_rows = n_batches
        if config.reward.fn is not None or config.reward.has_model:
            changes |= {"reward": {"fn": f"{varied_reward.__file__}:reward_fn", "workers": 1}}
    try:
        return subject.small_config({**changes, "train_dataset.batch_size": n_rows})
    except ConfigError as error:
        raise refused_short_run(f"{_STEPS} steps, and {_STEPS // 2} of them resumed,", error) from error


def _different_files(one: Path, other: Path) -> Iterator[str]:
    """Yield the files of the last states of two runs that differ: weights, moments and counters."""
    first, second = (StateFolder(folder / STATE, keep=2).path_of(_STEPS) for folder in (one, other))
    for path in sorted(first.rglob("*")):
        twin = second / path.relative_to(first)
        if path.suffix == ".json" or not path.is_file():
            continue
        if not twin.is_file() or path.read_bytes() != twin.read_bytes():
            yield f"the state of step {_STEPS} differs in {path.relative_to(first)}"


def _different_metrics(one: Path, other: Path) -> Iterator[str]:
    first, second = (RunReader(folder).steps() for folder in (one, other))
    for step in range(1, _STEPS + 1):
        for name, value in first.get(step, {}).items():
            if not any(word in name for word in _CLOCKS) and second.get(step, {}).get(name) != value:
                yield f"step {step}: {name} is {value} and {second.get(step, {}).get(name)}"
