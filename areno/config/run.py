"""What surrounds the models of a run: data, sampling, rollout, reward, saving, logging, devices. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.config.fields import Section, check, file_check, knob, settings
from areno.errors import Problem


@dataclass(kw_only=True)
class DatasetConfig(Section):
    """Where rows come from and how many go into a step."""

    path: str | None = knob(
        None,
        help="json, jsonl, parquet, csv, tsv or arrow file, save_to_disk folder, or hub name repo[:config[:split]]",
        flag="--dataset-path",
        needed=True,
    )
    loader: str | None = knob(
        None,
        help="file.py[:function]; load_dataset(path, split) returns the rows",
        flag="--dataset-loader-fn",
    )
    split: str = knob("train", help="split, where the source has several")
    batch_size: int = knob(32, help="prompts (RL) or rows (SFT) for each step", gt=0, flag="--batch-size")
    shuffle: bool = knob(True, help="new order every epoch, from seed")
    drop_last: bool = knob(True, help="leave out the last batch of an epoch if it is not full")
    max_length: int = knob(
        1024,
        help="longest prompt (RL) or row (SFT) in tokens; longer ones are skipped and counted",
        gt=0,
        flag="--max-prompt-tokens",
    )


@dataclass(kw_only=True)
class ValidDatasetConfig(DatasetConfig):
    """Rows for evaluation: read in order, all of them."""

    split: str = knob("test", help="split, where the source has several")
    shuffle: bool = knob(False, help="new order every time, from seed")
    drop_last: bool = knob(False, help="leave out the last batch if it is not full")


@dataclass(kw_only=True)
class GenerationConfig(Section):
    """How completions are drawn."""

    n_samples: int = knob(8, help="completions for each prompt", gt=0, flag="--n-samples")
    max_new_tokens: int = knob(3071, help="longest completion in tokens", gt=0, flag="--max-new-tokens")
    min_new_tokens: int = knob(0, help="no end of sequence before this many tokens", ge=0)
    max_tokens: int | None = knob(
        None, help="longest prompt plus completion in tokens; null = the model's limit", gt=0, flag="--max-context-len"
    )
    temperature: float = knob(1.0, help="softmax temperature, in sampling and in training", gt=0, flag="--temperature")
    top_k: int = knob(-1, help="keep the k most likely tokens; -1 = all", ge=-1, flag="--top-k")
    top_p: float = knob(1.0, help="keep the most likely tokens of this total probability", gt=0, le=1, flag="--top-p")
    greedy: bool = knob(False, help="always the most likely token", flag="--greedy")
    stop: list[str] | None = knob(None, help="strings that end a completion")
    stop_token_ids: list[int] | None = knob(None, help="token ids that end a completion, beside the model's own")
    ignore_eos: bool = knob(False, help="go on to max_new_tokens")
    skip_special_tokens: bool = knob(True, help="leave special tokens out of the text that rewards and logs see")

    @check
    def prompts_have_room(self) -> Iterator[Problem]:
        if self.max_tokens is not None and self.max_tokens <= self.max_new_tokens:
            yield Problem(
                "max_tokens",
                f"is {self.max_tokens}, which leaves no room for a prompt beside max_new_tokens={self.max_new_tokens}",
            )

    @check
    def shortest_below_longest(self) -> Iterator[Problem]:
        if self.min_new_tokens > self.max_new_tokens:
            yield Problem(
                "min_new_tokens", f"is {self.min_new_tokens}, more than max_new_tokens={self.max_new_tokens}; lower it"
            )

    @check
    def top_k_keeps_something(self) -> Iterator[Problem]:
        if self.top_k == 0:
            yield Problem("top_k", "is 0, which keeps no token; use -1 for all or a positive number")

    @check
    def stop_strings_have_text(self) -> Iterator[Problem]:
        if "" in (self.stop or []):
            yield Problem("stop", "holds an empty string, which every completion has; leave it out")


@dataclass(kw_only=True)
class RolloutConfig(Section):
    """How the decoder runs."""

    max_concurrent_rollouts: int | None = knob(
        None,
        help="sequences decoded at once; null = batch_size * n_samples",
        gt=0,
        flag="--max-running-prompts",
    )
    max_prefill_tokens: int = knob(8192, help="prompt tokens in one forward pass; longer prompts go in pieces", gt=0)
    mem_fraction: float = knob(
        0.6, help="share of the memory free after loading that the KV cache may take (CUDA)", gt=0, lt=1
    )
    max_kv_tokens: int | None = knob(
        None, help="size of the KV cache in tokens; null = what is needed, within mem_fraction", gt=0
    )
    eager_decode: bool = knob(False, help="no CUDA graphs", flag="--eager-decode")
    drop_rollout_state: bool = knob(False, help="free KV cache and graphs between steps", flag="--drop-rollout-state")
    enable_thinking: bool | None = knob(
        None, help="passed to the chat template; null = the template's own default", flag="--disable-thinking"
    )
    dynamic_sampling: bool = knob(
        False,
        help="drop prompts whose samples all have the same reward, and sample others in their place (DAPO 2503.14476 "
        "sec. 3.2); dynamic_bs=true trains on what is left instead",
    )
    max_sampling_rounds: int = knob(
        10,
        help="batches of prompts that dynamic_sampling may sample for one step; then it trains on what there is",
        gt=0,
    )
    dump_to_file: bool = knob(False, help="write every completion with its reward to rollouts/<step>.jsonl")

    @check
    def rounds_have_a_cause(self) -> Iterator[Problem]:
        rounds = self.max_sampling_rounds
        if not self.dynamic_sampling and rounds != settings(RolloutConfig)["max_sampling_rounds"].default():
            yield Problem("max_sampling_rounds", f"is {rounds}, but dynamic_sampling is false; set it to true")


@dataclass(kw_only=True)
class RewardConfig(Section):
    """The reward of a completion: of a function, of a reward model, or the sum of both."""

    fn: str | None = knob(
        None, help="file.py[:function] (default function: reward_fn), or a built-in: math", flag="--reward-fn-path"
    )
    path: str | None = knob(
        None,
        help="reward model: a ...ForSequenceClassification folder or hub id with one label and the actor's tokenizer; "
        "its score of the whole row is added to what fn returns",
        flag="--reward-ckpt",
    )
    offload: bool = knob(False, help="keep the reward model in host memory while it is not used (CUDA)")
    timeout_s: float = knob(30.0, help="seconds for one call of fn; then the sample counts as a timeout", gt=0)
    workers: int = knob(2, help="processes that call fn", gt=0)

    @file_check
    def something_rewards(self) -> Iterator[Problem]:
        if self.fn is None and self.path is None:
            yield Problem(
                "fn", "missing (file.py[:function] or a built-in: math); or set reward.path to a reward model"
            )

    @check
    def offload_has_a_model(self) -> Iterator[Problem]:
        if self.offload and self.path is None:
            yield Problem("offload", "is true, but reward.path names no model")


@dataclass(kw_only=True)
class FrequencyConfig(Section):
    """When something happens; what is null never triggers."""

    freq_steps: int | None = knob(None, help="every so many steps", gt=0)
    freq_epochs: int | None = knob(None, help="every so many epochs", gt=0)
    freq_secs: float | None = knob(None, help="when so many seconds have passed, at the next step", gt=0)


@dataclass(kw_only=True)
class SaverConfig(FrequencyConfig):
    """When and where checkpoints are written. The end of a run always saves."""

    path: str | None = knob(None, help="folder; null = checkpoints/ of the run", flag="--save-path")
    freq_steps: int | None = knob(100, help="every so many steps", gt=0, flag="--save-interval")


@dataclass(kw_only=True)
class EvaluatorConfig(FrequencyConfig):
    """When valid_dataset is scored. The end of a run always evaluates, if there is a valid_dataset."""

    eval_before_train: bool = knob(False, help="also before the first step")


@dataclass(kw_only=True)
class TensorBoardConfig(Section):
    """TensorBoard event files."""

    path: str | None = knob(None, help="folder; null = tensorboard/ of the run", flag="--metrics-log-dir")


@dataclass(kw_only=True)
class StatsLoggerConfig(Section):
    """Where metrics go besides the console and logs/metrics.jsonl."""

    tensorboard: TensorBoardConfig = knob(factory=TensorBoardConfig, help="TensorBoard")


@dataclass(kw_only=True)
class EngineConfig(Section):
    """Devices and processes."""

    device: Literal["auto", "cpu", "cuda"] = knob("auto", help="auto = cuda where there is one")
    world_size: int | None = knob(
        None, help="devices; null = every visible one, and one on CPU", gt=0, flag="--world-size"
    )
    tp_size: int = knob(1, help="devices that share one copy of the model (tensor parallel)", gt=0, flag="--tp-size")
    workers: Literal["auto", "inline", "spawn"] = knob(
        "auto", help="inline = in the driver process (one device only); auto = inline for one CPU device"
    )
    attn_backend: Literal["auto", "flash", "native"] = knob(
        "auto",
        help="attention for training and prefill: flash = the flash-attn package, native = torch's own",
        flag="--attn-backend",
    )
    dummy_load: bool = knob(False, help="random weights, for benchmarks; the folder needs no weight files")

    @check
    def tensor_parallel_divides_world(self) -> Iterator[Problem]:
        if self.world_size is not None and self.world_size % self.tp_size:
            yield Problem("tp_size", f"is {self.tp_size}, which does not divide engine.world_size={self.world_size}")

    @check
    def inline_is_one_device(self) -> Iterator[Problem]:
        if self.workers == "inline" and (self.world_size or 1) > 1:
            yield Problem("workers", f"inline holds one device, but engine.world_size is {self.world_size}; use spawn")


@dataclass(kw_only=True)
class ClusterConfig(Section):
    """Where a run leaves its files."""

    fileroot: str = knob("outputs", help="folder of all runs: <fileroot>/<experiment_name>/<trial_name or time>")
