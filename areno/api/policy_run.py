"""What the loops of policy algorithms stand on: prompts to scored samples, evaluation, the ends of a step and of a run.

The algorithm itself (rows, advantages, updates) is in trainers/policy_only.py and trainers/ppo.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from areno.api.algorithms import check_config, loss_of
from areno.api.batches import BatchLoader, prompt_loader
from areno.api.build import open_model, role_specs, rollout_spec, sampling_params
from areno.api.console import log_metric, log_stage, setup_logging
from areno.api.data import open_rows, valid_section
from areno.api.dumps import completions_to_log, dump_rollouts, log_completions
from areno.api.loop import RolloutProgress, Run, Stopwatch
from areno.api.metrics import rollout_metrics
from areno.api.rewards import RewardPool
from areno.api.rows import (
    correct_rows,
    first_groups,
    group_ids,
    n_groups,
    needs_proximal,
    policy_rows,
    sample_rewards,
    trained,
    with_a_difference,
)
from areno.api.trainer import Trainer
from areno.api.types import Batch, PromptItem, RewardOutcome, RewardRecord, RolloutResult, ScoredSample
from areno.config import run_folder
from areno.config.experiments import PolicyExperimentConfig
from areno.config.run import DatasetConfig, GenerationConfig
from areno.engine.types import TrainSequence

logger = logging.getLogger("areno")

Self = TypeVar("Self", bound="PolicyRun")  # typing has it from Python 3.11 on

RewardFn = Callable[[RewardRecord], Any]
LossFn = Callable[..., Any]  # see areno.loss_fns
# (rows, group of each row, actor's settings) -> for each row, an array over its trained tokens. In the PPO loop, where
# rows have values: two such lists, advantages and returns.
AdvantageFn = Callable[[Sequence[TrainSequence], Sequence[int], Any], Any]


@dataclass
class Collected:
    """What one step sampled. `samples` are all of it, `kept` those to train on, which have a reward.

    skipped_long, total_skipped_long: see Batch. numbers: rollout/* scalars about the choice.
    """

    samples: list[ScoredSample]
    kept: list[ScoredSample]
    skipped_long: int
    total_skipped_long: int
    numbers: dict[str, float] = field(default_factory=dict)


class PolicyRun:
    """A model, its prompts and its rewards, for one run of `config`. The loops are its subclasses.

    loss_fn: (pack, logprobs) -> (loss, stats), see areno.loss_fns; None is the one that config describes.
    run_dir: where logs, rollouts and checkpoints go; None is a new folder under cluster.fileroot.
    advantage_fn: see AdvantageFn; None is the loop's own.
    train_dataset, valid_dataset: rows that a script holds, in place of the configured paths. reward_fn: a function, in
    place of reward.fn.

    Construction checks what can be checked, starts the reward processes and loads the models. Use as a context manager,
    or call close().
    """

    loop: Literal["policy_only", "ppo"]  # see Algorithm

    def __init__(
        self,
        config: PolicyExperimentConfig,
        loss_fn: LossFn | None = None,
        run_dir: str | Path | None = None,
        *,
        advantage_fn: AdvantageFn | None = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        reward_fn: RewardFn | None = None,
    ):
        check_config(config, self.loop)
        self.config, self.advantage_fn = config, advantage_fn
        self.loss_fn = loss_of(config, self.loop) if loss_fn is None else loss_fn
        setup_logging()
        completions_to_log()  # a mistyped variable should not end a run after its first rollout
        has_function = reward_fn is not None or config.reward.fn is not None or config.reward.path is None
        self.rewards = RewardPool(config.reward, reward_fn) if has_function else None
        self.run: Run | None = None
        self.trainer: Trainer | None = None
        try:
            if self.rewards is not None:
                self.rewards.start()  # it imports the user's file while the data is read
            self._open(run_dir, train_dataset, valid_dataset)
        except BaseException:
            self.close()
            raise

    def _open(self, run_dir: str | Path | None, train_rows: Any, valid_rows: Any) -> None:
        config = self.config
        spec, self.tokenizer = open_model(config)
        roles = role_specs(config, spec)
        self.rollout_spec, self.context_len = rollout_spec(config, spec.context_len), spec.context_len
        self.eval_gconfig = config.eval_gconfig or config.gconfig
        self.accuracies: list[float] = []  # of each evaluation so far
        self.mean_rewards: list[float] = []  # of each training step so far
        self.loader = self._loader(config.train_dataset, train_rows, "train_dataset", config.gconfig, "gconfig")
        self.valid_loader = None
        if (valid := valid_section(config, valid_rows)) is not None:
            eval_key = "gconfig" if config.eval_gconfig is None else "eval_gconfig"
            self.valid_loader = self._loader(valid, valid_rows, "valid_dataset", self.eval_gconfig, eval_key)
        if self.rewards is not None:
            self.rewards.wait_ready()
        self.run = Run(config, run_folder.for_script(config) if run_dir is None else run_dir)
        self.trainer = Trainer.from_spec(spec, self.tokenizer, workers=config.engine.workers)
        self.trainer.ensure_roles(roles)

    def steps(self) -> Iterator[tuple[int, Batch[PromptItem]]]:
        """(step, prompts) of the run, an evaluation before the first if that is asked for."""
        assert self.run is not None
        if self.valid_loader is not None and self.config.evaluator.eval_before_train:
            self.evaluate()
        yield from self.run.steps(self.loader)

    def collect(self, batch: Batch[PromptItem], seed: int, watch: Stopwatch) -> Collected:
        """Sample and score the prompts of a step, and others in place of groups that dynamic_sampling drops."""
        assert self.run is not None
        config = self.config
        found = self._sample_and_score(batch.items, seed, watch)
        out = Collected(found, found, batch.skipped_long, batch.total_skipped_long)
        if config.rollout.dynamic_sampling:
            rounds, size = 1, len(batch)
            out.kept = with_a_difference(found)
            while n_groups(out.kept) < size and not config.dynamic_bs and rounds < config.rollout.max_sampling_rounds:
                more = self.run.more()
                if more is None:
                    break
                found = self._sample_and_score(more.items, seed + (rounds << 40), watch)
                out.samples, out.kept = out.samples + found, out.kept + with_a_difference(found)
                out.skipped_long, out.total_skipped_long = out.skipped_long + more.skipped_long, more.total_skipped_long
                rounds += 1
            out.kept = first_groups(out.kept, size)
            dropped = n_groups(out.samples) - n_groups(out.kept)
            out.numbers = {"rollout/sampling_rounds": rounds, "rollout/dropped_groups": dropped}
            if not out.kept:
                logger.warning("all groups of this step have equal rewards: there is nothing to prefer in them")
                out.kept = found
        out.kept = [sample for sample in out.kept if sample.outcome.value is not None]
        return out

    def _sample_and_score(self, items: Sequence[PromptItem], seed: int, watch: Stopwatch) -> list[ScoredSample]:
        items = [copy.copy(item) for item in items]  # what groups are told by: a prompt that comes again has another
        with watch.phase("rollout"):
            results = self.sample(items, self.config.gconfig, seed, "rollout")
        with watch.phase("reward"):
            return self.score(items, results, self.config.gconfig)

    def sample(
        self, items: Sequence[PromptItem], gconfig: GenerationConfig, seed: int, title: str
    ) -> list[RolloutResult]:
        """Completions of every prompt, in a rollout phase of their own."""
        assert self.trainer is not None
        log_stage(f"{title}_start")
        dp_size = self.trainer.engine.spec.dp_size
        last_reward = self.mean_rewards[-1] if self.mean_rewards else None
        progress = RolloutProgress(title, len(items), gconfig.n_samples, dp_size, last_reward)
        with self.trainer.rollout_phase(self.rollout_spec, drop=self.config.rollout.drop_rollout_state), progress:
            results = self.trainer.rollout_token_batch(
                [item.tokens for item in items],
                gconfig.n_samples,
                sampling_params(gconfig),
                seed=seed,
                on_progress=progress,
            )
        log_stage(f"{title}_end")
        return results

    def score(
        self, items: Sequence[PromptItem], results: Sequence[RolloutResult], gconfig: GenerationConfig
    ) -> list[ScoredSample]:
        """Every completion with its text and its reward, of the function, of the reward model, or the sum of both."""
        pairs = [(item, sequence) for item, result in zip(items, results, strict=True) for sequence in result.sequences]
        token_rows = [sequence.resp_tokens for _, sequence in pairs]
        rendered = self.tokenizer.batch_decode(token_rows, skip_special_tokens=False)
        texts = rendered
        if gconfig.skip_special_tokens:
            texts = self.tokenizer.batch_decode(token_rows, skip_special_tokens=True)
        outcomes = [RewardOutcome(0.0)] * len(pairs)
        if self.rewards is not None:
            outcomes = self.rewards.score(
                [
                    RewardRecord.of_completion(item, sequence, text, raw)
                    for (item, sequence), text, raw in zip(pairs, texts, rendered, strict=True)
                ]
            )
        if self.config.reward.path is not None:
            assert self.trainer is not None
            scores = self.trainer.score_rewards(
                "reward", [item.tokens + sequence.resp_tokens for item, sequence in pairs]
            )
            outcomes = [
                outcome if outcome.value is None else RewardOutcome(outcome.value + score)
                for outcome, score in zip(outcomes, scores, strict=True)
            ]
        return [
            ScoredSample(item=item, sequence=sequence, completion=text, outcome=outcome)
            for (item, sequence), text, outcome in zip(pairs, texts, outcomes, strict=True)
        ]

    def evaluate(self) -> dict[str, float]:
        """Sample and score the whole of valid_dataset; records and returns eval/* scalars by name."""
        assert self.run is not None
        assert self.valid_loader is not None
        samples: list[ScoredSample] = []
        for batch in self.valid_loader.batches():
            results = self.sample(batch.items, self.eval_gconfig, self.config.seed, "eval")
            samples += self.score(batch.items, results, self.eval_gconfig)
        metrics = rollout_metrics(samples, np.zeros(len(samples)))
        kept = ("rewards_mean", "accuracy", "response_len_mean", "truncated", "num_sequences")
        scalars = {name: metrics[f"rollout/{name}"] for name in kept}
        self.run.log_evaluation(scalars, ("accuracy", "rewards_mean"))
        self.accuracies.append(scalars["accuracy"])
        return scalars

    # -- the step's other halves -----------------------------------------------------------------------------------

    def rows(self, collected: Collected, watch: Stopwatch) -> tuple[list[TrainSequence], list[int]]:
        """Rows to train on, with their shaped reward and, where there is one, the reference's log-probabilities.

        Also the number of each row's group.
        """
        assert self.trainer is not None
        actor = self.config.actor
        rewards = sample_rewards(collected.kept, actor, self.config.gconfig.max_new_tokens)
        eos = self.tokenizer.eos_token_id or 0
        rows = policy_rows(collected.kept, rewards, eos, drop_truncated=actor.mask_no_eos_with_zero)
        if self.config.ref is not None:
            with watch.phase("ref"):
                for row, logprobs in zip(rows, self.logprobs("ref", rows), strict=True):
                    row.ref_logprobs = logprobs
        return rows, group_ids(collected.kept)

    def correct(self, rows: Sequence[TrainSequence], watch: Stopwatch) -> dict[str, float]:
        """See correct_rows; nothing where the actor's settings need no second forward pass."""
        if not needs_proximal(self.config.actor):
            return {}
        with watch.phase("recompute"):
            return correct_rows(rows, self.logprobs("actor", rows), self.config.actor)

    def logprobs(self, role: str, rows: Sequence[TrainSequence]) -> list[list[float]]:
        """Of every token of the rows, under a role's model, at the temperature of the rollout."""
        assert self.trainer is not None
        return self.trainer.score_logprobs(role, [row.tokens or [] for row in rows], self.config.gconfig.temperature)

    def train(self, rows: Sequence[TrainSequence], seed: int, watch: Stopwatch) -> dict[str, float]:
        """Optimizer steps of the actor."""
        assert self.trainer is not None
        actor = self.config.actor
        with watch.phase("train"):
            log_stage("train_start")
            stats = self.trainer.train(
                rows,
                self.loss_fn,
                gradient_accumulation_steps=actor.gradient_accumulation_steps,
                mb_spec=actor.mb_spec,
                n_minibatches=actor.ppo_n_minibatches,
                temperature=self.config.gconfig.temperature,
                seed=seed,
            )
            log_stage("train_end")
        stats["tokens_per_second"] = sum(len(row.tokens or []) for row in rows) / watch.seconds["train"]
        return stats

    def log_rollout(self, collected: Collected, rows: Sequence[TrainSequence], watch: Stopwatch) -> None:
        """Record rollout/*, and show and dump the samples that the settings ask for."""
        assert self.run is not None
        mean_of = {id(s): a.mean() for s, a in zip(collected.kept, trained(rows, "advantages"), strict=True) if a.size}
        samples = collected.samples
        metrics = rollout_metrics(
            samples,
            [mean_of.get(id(sample), 0.0) for sample in samples],
            skipped_long=collected.skipped_long,
            total_skipped_long=collected.total_skipped_long,
        )
        n_tokens = sum(len(sample.sequence.resp_tokens) for sample in samples)
        metrics["rollout/tokens_per_second"] = n_tokens / watch.seconds["rollout"]
        log_metric("reward_mean", metrics["rollout/rewards_mean"])
        log_metric("rollout_logprob_mean", metrics["rollout/logprobs_mean"])
        self.run.log({**metrics, **collected.numbers})
        self.mean_rewards.append(metrics["rollout/rewards_mean"])
        log_completions(samples, self.run.step)
        if self.config.rollout.dump_to_file:
            dump_rollouts(self.run.folder / "rollouts", self.run.step, samples)

    def end_step(self, stats: Mapping[str, float], watch: Stopwatch) -> None:
        """Log the step; save and evaluate where that is due."""
        assert self.run is not None
        shown = {name: stats[name] for name in ("response_len", "explained_variance") if name in stats}
        self.run.log_step(stats, watch, {"reward_mean": self.mean_rewards[-1], **shown})
        self.run.save_if_due(self.write_checkpoint)
        if self.run.evaluation_is_due() and self.valid_loader is not None:
            self.evaluate()

    def write_checkpoint(self, folder: Path) -> None:
        """Fill the folder of a checkpoint."""
        assert self.trainer is not None
        self.trainer.write_checkpoint(folder)

    def finish(self) -> float:
        """Save and evaluate; the last accuracy or, without evaluation, the mean reward of the last 5 steps."""
        assert self.run is not None
        self.run.save_at_end(self.write_checkpoint)
        reward = float(np.mean(self.mean_rewards[-5:]))
        changes = {"reward_mean": (self.mean_rewards[0], reward)}
        if self.valid_loader is not None:
            if self.run.evaluated_step != self.run.step:
                self.evaluate()
            if len(self.accuracies) > 1:
                changes["eval_accuracy"] = (self.accuracies[0], self.accuracies[-1])
        self.run.log_end(**changes)
        return self.accuracies[-1] if self.accuracies else reward

    def close(self) -> None:
        """End the reward processes and the workers, close the logs."""
        for part in (self.rewards, self.trainer, self.run):
            if part is not None:
                part.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _loader(
        self, dataset: DatasetConfig, rows: Any, key: str, gconfig: GenerationConfig, gconfig_key: str
    ) -> BatchLoader[PromptItem]:
        rows, dataset = open_rows(dataset, rows, "prompt", key)
        return prompt_loader(
            rows,
            self.tokenizer,
            dataset,
            context_len=gconfig.max_tokens or self.context_len,
            context_key=f"{gconfig_key}.max_tokens" if gconfig.max_tokens else "the model's context",
            enable_thinking=self.config.rollout.enable_thinking,
            seed=self.config.seed,
            key=key,
        )
