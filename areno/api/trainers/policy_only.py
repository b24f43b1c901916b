"""The loop of GSPO, GRPO and their relatives: sample a group for each prompt, score it, compute advantages, update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areno.api.batches import BatchLoader, prompt_loader
from areno.api.build import open_model, reference_role, rollout_spec, sampling_params
from areno.api.console import log_metric, log_stage, setup_logging
from areno.api.data import load_rows
from areno.api.dumps import completions_to_log, dump_rollouts, log_completions
from areno.api.loop import RolloutProgress, Run, Stopwatch
from areno.api.metrics import rollout_metrics
from areno.api.rewards import RewardPool
from areno.api.rows import policy_rows, replace_logprobs, sample_advantages
from areno.api.trainer import Trainer
from areno.api.types import Batch, PromptItem, RewardRecord, RolloutResult, ScoredSample
from areno.config.experiments import PolicyExperimentConfig
from areno.config.run import DatasetConfig, GenerationConfig
from areno.engine.types import TrainSequence


class PolicyOnlyTrainer:
    """Trains a policy from rewards, without a critic.

    config: the experiment. loss_fn: (pack, logprobs) -> (loss, stats), see areno.loss_fns. run_dir: where logs,
    rollouts and checkpoints go. Construction checks what can be checked, starts the reward processes and loads the
    model. Use as a context manager, or call close().
    """

    def __init__(self, config: PolicyExperimentConfig, loss_fn: Any, run_dir: Path):
        self.config, self.loss_fn = config, loss_fn
        setup_logging()
        completions_to_log()  # a mistyped variable should not end a run after its first rollout
        self.rewards = RewardPool(config.reward)
        self.run: Run | None = None
        self.trainer: Trainer | None = None
        try:
            self.rewards.start()  # it imports the user's file while the data is read
            self._open(run_dir)
        except BaseException:
            self.close()
            raise

    def _open(self, run_dir: Path) -> None:
        config = self.config
        spec, self.tokenizer = open_model(config)
        roles = reference_role(config, spec)
        self.rollout_spec, self.context_len = rollout_spec(config, spec.context_len), spec.context_len
        self.eval_gconfig = config.eval_gconfig or config.gconfig
        self.accuracies: list[float] = []  # of each evaluation so far
        self.last_reward: float | None = None  # mean reward of the last training step
        self.loader = self._loader(config.train_dataset, "train_dataset", config.gconfig, "gconfig")
        self.valid_loader = None
        if config.valid_dataset is not None:
            eval_key = "gconfig" if config.eval_gconfig is None else "eval_gconfig"
            self.valid_loader = self._loader(config.valid_dataset, "valid_dataset", self.eval_gconfig, eval_key)
        self.rewards.wait_ready()
        self.run = Run(config, run_dir)
        self.trainer = Trainer(spec, workers=config.engine.workers)
        self.trainer.engine.ensure_roles(roles)

    def fit(self) -> float:
        """Run to the end; the accuracy of the last evaluation or, without one, the mean reward of the last 5 steps."""
        config, run, trainer = self.config, self.run, self.trainer
        assert run is not None
        assert trainer is not None
        mean_rewards: list[float] = []
        if self.valid_loader is not None and config.evaluator.eval_before_train:
            self.evaluate()

        for step, batch in run.steps(self.loader):
            watch, seed = Stopwatch(), config.seed * 1_000_003 + step
            with watch.phase("rollout"):
                results = self.sample(batch.items, config.gconfig, seed, "rollout")
            with watch.phase("reward"):
                samples = self.score(batch.items, results, config.gconfig)
            with watch.phase("advantage"):
                advantages = sample_advantages(samples, config.actor.adv_norm)
                rows = policy_rows(samples, advantages, self.tokenizer.eos_token_id or 0)
            agreement: dict[str, float] = {}
            if config.actor.recompute_logprob:
                with watch.phase("recompute"):
                    agreement = replace_logprobs(rows, self._logprobs("actor", rows))
            if config.actor.kl_ctl > 0:
                with watch.phase("ref"):
                    for row, logprobs in zip(rows, self._logprobs("ref", rows), strict=True):
                        row.ref_logprobs = logprobs
            rollout = self._log_rollout(samples, advantages, batch, watch)
            with watch.phase("train"):
                log_stage("train_start")
                stats = trainer.train(
                    rows,
                    self.loss_fn,
                    n_minibatches=config.actor.ppo_n_minibatches,
                    gradient_accumulation_steps=config.actor.gradient_accumulation_steps,
                    temperature=config.gconfig.temperature,
                    seed=seed,
                )
                log_stage("train_end")
            stats.update(agreement)
            stats["tokens_per_second"] = sum(len(row.tokens or []) for row in rows) / watch.seconds["train"]
            self.last_reward = rollout["rollout/rewards_mean"]
            mean_rewards.append(self.last_reward)
            run.log_step(stats, watch, {"reward_mean": mean_rewards[-1], "response_len": stats["response_len"]})
            run.save_if_due(trainer.save_checkpoint)
            if run.evaluation_is_due() and self.valid_loader is not None:
                self.evaluate()

        run.save_at_end(trainer.save_checkpoint)
        reward = float(np.mean(mean_rewards[-5:]))
        changes = {"reward_mean": (mean_rewards[0], reward)}
        if self.valid_loader is not None:
            if run.evaluated_step != run.step:
                self.evaluate()
            if len(self.accuracies) > 1:
                changes["eval_accuracy"] = (self.accuracies[0], self.accuracies[-1])
        run.log_end(**changes)
        return self.accuracies[-1] if self.accuracies else reward

    def sample(
        self, items: Sequence[PromptItem], gconfig: GenerationConfig, seed: int, title: str
    ) -> list[RolloutResult]:
        """Completions of every prompt, in a rollout phase of their own."""
        assert self.trainer is not None
        log_stage(f"{title}_start")
        dp_size = self.trainer.engine.spec.dp_size
        progress = RolloutProgress(title, len(items), gconfig.n_samples, dp_size, self.last_reward)
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
        """Every completion with its text and what the reward function made of it, group by group."""
        pairs = [(item, sequence) for item, result in zip(items, results, strict=True) for sequence in result.sequences]
        token_rows = [sequence.resp_tokens for _, sequence in pairs]
        rendered = self.tokenizer.batch_decode(token_rows, skip_special_tokens=False)
        texts = rendered
        if gconfig.skip_special_tokens:
            texts = self.tokenizer.batch_decode(token_rows, skip_special_tokens=True)
        outcomes = self.rewards.score(
            [
                RewardRecord.of_completion(item, sequence, text, raw)
                for (item, sequence), text, raw in zip(pairs, texts, rendered, strict=True)
            ]
        )
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

    def close(self) -> None:
        """End the reward processes and the workers, close the logs."""
        self.rewards.close()
        for part in (self.trainer, self.run):
            if part is not None:
                part.close()

    def __enter__(self) -> PolicyOnlyTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _loader(
        self, dataset: DatasetConfig, key: str, gconfig: GenerationConfig, gconfig_key: str
    ) -> BatchLoader[PromptItem]:
        return prompt_loader(
            load_rows(dataset, "prompt", key),
            self.tokenizer,
            dataset,
            context_len=gconfig.max_tokens or self.context_len,
            context_key=f"{gconfig_key}.max_tokens" if gconfig.max_tokens else "the model's context",
            enable_thinking=self.config.rollout.enable_thinking,
            seed=self.config.seed,
            key=key,
        )

    def _logprobs(self, role: str, rows: Sequence[TrainSequence]) -> list[list[float]]:
        assert self.trainer is not None
        return self.trainer.score_logprobs(role, [row.tokens or [] for row in rows], self.config.gconfig.temperature)

    def _log_rollout(
        self, samples: list[ScoredSample], advantages: np.ndarray, batch: Batch[PromptItem], watch: Stopwatch
    ) -> dict[str, float]:
        assert self.run is not None
        metrics = rollout_metrics(
            samples, advantages, skipped_long=batch.skipped_long, total_skipped_long=batch.total_skipped_long
        )
        n_tokens = sum(len(sample.sequence.resp_tokens) for sample in samples)
        metrics["rollout/tokens_per_second"] = n_tokens / watch.seconds["rollout"]
        log_metric("reward_mean", metrics["rollout/rewards_mean"])
        log_metric("rollout_logprob_mean", metrics["rollout/logprobs_mean"])
        self.run.log(metrics)
        log_completions(samples, self.run.step)
        if self.config.rollout.dump_to_file:
            dump_rollouts(self.run.folder / "rollouts", self.run.step, samples)
        return metrics
