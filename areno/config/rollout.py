"""Settings of sampling, of the decoder, of tuning and of agents. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal

from areno.config.resuming import FROM_HERE, SPEED_AND_ORDER
from areno.errors import ConfigError, Problem
from areno.schema.fields import Flag, Needs, Section, require, setting, setting_as_in, settings

MIN_TEMPERATURE = 1e-5
"""Lower temperatures count as 0: logits divided by them would leave the range of float32."""
MAX_TEMPERATURE = 1e5
_MOST = 2**31 - 1
# A script may set greedy in a section that also has other sampling settings.
_DRAWING = Needs("greedy", False, so="the most likely token is taken", in_build=True)


def _logit_edit_setting(default: float, **declared: Any) -> Any:
    """Declare a sampling setting that changes logits, in `LogitEdits` and not in the sampling kernel.

    Args:
        default: The default value, with which no logit changes.
        **declared: Further arguments of `setting`.
    """
    field = setting(default, **declared)
    field.metadata = MappingProxyType({**field.metadata, "edits_logits": True})
    return field


@dataclass(kw_only=True)
class SamplingConfig(Section):
    """Settings for sampling one completion. Base class of the section `gconfig` and of a script's `SamplingParams`.

    Every sampling setting is declared here with its default and its bounds. Subclasses change only defaults and
    bounds.
    """

    greedy: bool = setting(
        False,
        help="Always take the most likely token. In training, this needs an agent or n_samples=1, because all "
        "samples of a prompt would be equal",
        flag=Flag(
            "--greedy",
            help="Always take the most likely token. Needs --agent-fn or --n-samples 1, because all samples of a "
            "prompt would be equal. With --n-samples 1, also set actor.adv_norm=null: a group of one sample has no "
            "advantage",
        ),
    )
    top_p: float = setting(
        1.0,
        help="Sample from the smallest set of most likely tokens with a total probability of at least top_p. 1: all "
        "tokens",
        gt=0,
        le=1,
        only_with=_DRAWING,
        flag="--top-p",
    )
    top_k: int = setting(
        -1,
        help="Sample only from the top_k most likely tokens. -1: all tokens",
        ge=-1,
        le=_MOST,
        only_with=_DRAWING,
        flag="--top-k",
    )
    max_new_tokens: int = setting(16, help="Maximum number of tokens of a completion", gt=0, flag="--max-new-tokens")
    min_new_tokens: int = setting(
        0,
        help="Minimum number of tokens of a completion, before which no end-of-sequence token, stop token or stop "
        "string ends it",
        ge=0,
    )
    temperature: float = setting(
        1.0,
        help="Softmax temperature, for sampling and for the log-probabilities in training",
        ge=0,
        le=MAX_TEMPERATURE,
        flag="--temperature",
    )
    frequency_penalty: float = setting(
        0.0,
        help="Subtracted from the logit of a token for each time that it is in the completion. Not a part of "
        "log-probabilities",
        ge=-2,
        le=2,
    )
    presence_penalty: float = _logit_edit_setting(
        0.0,
        help="Subtracted from the logit of a token that is in the completion. Not a part of log-probabilities",
        ge=-2,
        le=2,
    )
    min_p: float = _logit_edit_setting(
        0.0,
        help="Sample only tokens with at least min_p times the probability of the most likely one. Applied before "
        "top_k and top_p. 0: all tokens",
        ge=0,
        le=1,
        only_with=_DRAWING,
    )
    stop: list[str] | None = setting(None, help="Strings that end a completion. null: none")
    stop_token_ids: list[int] | None = setting(
        None, help="Token ids that end a completion, besides the model's end-of-sequence tokens. null: none"
    )
    ignore_eos: bool = setting(False, help="Do not stop at end-of-sequence tokens, but sample max_new_tokens tokens")
    skip_special_tokens: bool = setting(
        True, help="Remove special tokens from the text that reward functions and logs get"
    )

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy: `greedy` is set, or the temperature is below MIN_TEMPERATURE."""
        return self.greedy or self.temperature < MIN_TEMPERATURE

    @property
    def logprob_temperature(self) -> float:
        """Temperature at which log-probabilities are computed. 1 if `temperature` is below MIN_TEMPERATURE."""
        return 1.0 if self.temperature < MIN_TEMPERATURE else self.temperature

    @property
    def edits_logits(self) -> bool:
        """Whether a setting that `_edit` declares differs from its default, so that sampling needs `LogitEdits`."""
        return any(vars(self)[name] != default for name, default in _logit_edit_defaults())

    @require("min_new_tokens", "is {self.min_new_tokens}, more than max_new_tokens={self.max_new_tokens}; lower it")
    def min_new_tokens_fit_max(self) -> bool:
        return self.min_new_tokens <= self.max_new_tokens

    @require("top_k", "is 0, which keeps no token; use -1 for all or a positive number")
    def top_k_keeps_tokens(self) -> bool:
        return self.top_k != 0

    @require("stop", "contains an empty string, which would end every completion; leave it out")
    def stop_strings_have_text(self) -> bool:
        return "" not in (self.stop or [])

    @require("stop_token_ids", "is {self.stop_token_ids}; token ids are at least 0")
    def stop_token_ids_are_valid(self) -> bool:
        return min(self.stop_token_ids or [0]) >= 0


def flags_unused_by_greedy() -> dict[str, str]:
    """Return setting -> command-line flag for the settings that greedy decoding does not use."""
    known = settings(GenerationConfig)
    names = ["temperature", *(name for name, each in known.items() if _DRAWING in each.only_with)]
    return {name: known[name].flag.name for name in names if known[name].flag.name}


@cache
def _logit_edit_defaults() -> list[tuple[str, Any]]:
    """Return (name, default) of each `_logit_edit_setting`. With its default, a setting changes no logit."""
    declared = dataclasses.fields(SamplingConfig)
    return [(field.name, field.default) for field in declared if "edits_logits" in field.metadata]


def sampling_at_temperature(value: Any) -> SamplingConfig:
    """Return sampling settings with this temperature and, for the rest, the defaults.

    Args:
        value: The temperature that the logits were divided by.

    Raises:
        ConfigError: `value` is not a number from MIN_TEMPERATURE to MAX_TEMPERATURE.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not MIN_TEMPERATURE <= float(value) <= MAX_TEMPERATURE:
        expected = f"a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g} is expected"
        raise ConfigError(Problem("temperature", f"is {value!r}; {expected}"))
    return SamplingConfig(temperature=float(value))


@dataclass(kw_only=True)
class GenerationConfig(SamplingConfig):
    """Settings for sampling the completions of a prompt, in training or evaluation."""

    heading = "Rollout"
    n_samples: int = setting(8, help="Number of completions per prompt", gt=0, le=1_000_000, flag="--n-samples")
    max_new_tokens: int = setting_as_in(SamplingConfig, "max_new_tokens", default=3071)
    max_tokens: int | None = setting(
        None,
        help="Maximum number of tokens of prompt and completion. null: the context length of the model",
        gt=0,
        flag="--max-context-len",
    )
    # Training divides by the temperature, so it cannot be 0 in a run.
    temperature: float = setting_as_in(SamplingConfig, "temperature", ge=MIN_TEMPERATURE)

    def greedy_evaluation_problems(self, section: str) -> Iterator[Problem]:
        """Yield a problem if a temperature is set although evaluation is greedy and does not use a temperature.

        In training, the temperature of greedy samples still scales the logits. `section` is "gconfig" or
        "eval_gconfig".
        """
        if self.greedy and not self.is_default("temperature"):
            text = f"is {self.temperature}, but {section}.greedy takes the most likely token; "
            yield Problem(f"{section}.temperature", f"{text}set {section}.greedy=false")

    @require(
        "max_tokens",
        "is {self.max_tokens}, which leaves no room for a prompt beside max_new_tokens={self.max_new_tokens}",
    )
    def prompts_have_room(self) -> bool:
        return self.max_tokens is None or self.max_tokens > self.max_new_tokens


@dataclass(kw_only=True)
class DecoderConfig(Section):
    """Memory and speed of the decoder: prefill size, KV cache and CUDA graphs."""

    max_prefill_tokens: int = setting(
        8192,
        help="Largest number of prompt tokens per forward pass. Longer prompts are split (chunked prefill)",
        gt=0,
        on_resume=SPEED_AND_ORDER,
    )
    mem_fraction: float = setting(
        0.6,
        help="The KV cache gets this share of the memory that is free after the models are loaded (CUDA)",
        gt=0,
        lt=1,
        on_resume=SPEED_AND_ORDER,
    )
    max_kv_tokens: int | None = setting(
        None,
        help="Tokens for which the KV cache has room. null: as many as the run needs, within mem_fraction",
        gt=0,
        on_resume=SPEED_AND_ORDER,
    )
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        help="Data type of the KV cache. auto: that of the weights. fp8: 8 bits and a scale for each token and head, "
        "for nearly twice as many tokens; actor and reference then round keys and values in training and scoring, "
        "too. Use it with engine.exact",
    )
    eager_decode: bool = setting(
        False, help="Decode and prefill without CUDA graphs", flag="--eager-decode", on_resume=SPEED_AND_ORDER
    )
    speculation: Literal["auto", "on", "off"] = setting(
        "off",
        help="Draft the next tokens of a sample and verify several in one decode step, where faster. A draft is what "
        "followed the same tokens in earlier samples, also of earlier steps with engine.exact or on GPUs without "
        "engine.deterministic. Drafts change samples as little as another batch size, and not at all with "
        "engine.exact. auto: on for GPUs. Always off with prompts_ahead, max_head_offpolicyness, and dynamic_sampling "
        "with overlapping rounds",
        on_resume=SPEED_AND_ORDER,
    )

    @property
    def fp8_kv(self) -> bool:
        """Whether keys and values are rounded to FP8 and cached in it."""
        return self.kv_cache_dtype == "fp8"


@dataclass(kw_only=True)
class RolloutConfig(DecoderConfig):
    """Settings of the decoder in a run, and of the samples that a step trains on and records."""

    heading = "Rollout"
    max_concurrent_rollouts: int | None = setting(
        None,
        help="Most samples decoded at the same time. null: all samples of a step, and in an evaluation up to 512 per "
        "copy of the model, as far as a tenth of the free memory holds their keys and values",
        gt=0,
        flag="--max-running-prompts",
        on_resume=SPEED_AND_ORDER,
    )
    max_head_offpolicyness: int = setting(
        0,
        help="Largest age of a sample in steps, from its first token to the step that trains on it. 0: a step waits "
        "for all its samples. Above 0: it samples more prompts than its batch (prompts_ahead) and trains once enough "
        "are finished; unfinished samples and agents continue in the next step with new weights. The loss needs a "
        "correction, such as actor.use_decoupled_loss",
        ge=0,
    )
    prompts_ahead: int | None = setting(
        None,
        help="Prompts that a step samples beyond its batch, so as not to wait for its longest samples. Unfinished "
        "ones continue in the next step with max_head_offpolicyness above 0. With 0, their tokens are thrown away, "
        "and a later step samples postponed prompts alone and waits for them. null: 0, or with max_head_offpolicyness "
        "a quarter of the prompts decoded at once. Agents need max_head_offpolicyness above 0",
        gt=0,
    )
    drop_rollout_state: bool = setting(
        False,
        help="Free KV cache and CUDA graphs after each rollout, which leaves more memory for training. Not with "
        "agents that live across steps (max_head_offpolicyness above 0)",
        flag="--drop-rollout-state",
        on_resume=SPEED_AND_ORDER,
    )
    enable_thinking: bool | None = setting(
        None,
        help="Argument enable_thinking of the chat template. null: the template's default",
        flag=Flag("--disable-thinking", "false", "Render the chat template with enable_thinking=false"),
    )
    dynamic_sampling: bool = setting(
        False,
        help="Drop prompts whose samples all have the same reward, and sample others in their place (DAPO, arXiv "
        "2503.14476, sec. 3.2). With dynamic_bs, none are sampled. With max_head_offpolicyness above 0, another "
        "prompt begins as soon as one is dropped",
    )
    max_sampling_rounds: int = setting(
        10,
        help="With dynamic_sampling: most batches of prompts that a step takes from the data. If too few prompts are "
        "kept, it trains on fewer. 1: none are replaced, as with dynamic_bs",
        gt=0,
        only_with=(
            Needs("dynamic_sampling", so="no prompts are sampled again"),
            Needs("dynamic_bs", False, so="a step samples one batch"),
        ),
    )
    dump_to_file: bool = setting(
        False,
        help="Record every training sample in rollouts/<step>.jsonl in the folder of the run",
        on_resume=FROM_HERE,
    )
    dump_n_samples: int = setting(
        8,
        help="Without dump_to_file: samples per step that are recorded in rollouts/<step>.jsonl, drawn in whole "
        "groups. 0: none",
        ge=0,
        only_with=Needs("dump_to_file", False, so="all samples are kept"),
        on_resume=FROM_HERE,
    )


_TUNED = Needs("enabled", so="nothing is tuned")


@dataclass(kw_only=True)
class TuneConfig(Section):
    """Settings of the trial before a run, which chooses settings of speed and memory."""

    heading = "Tuning"
    enabled: bool = setting(
        False,
        help="Before a new run loads its models, choose those of rollout.max_concurrent_rollouts, "
        "rollout.drop_rollout_state, actor.gradient_checkpointing and actor.mb_spec that you have not set, and "
        "train_dataset.batch_size if you have not set it, which changes what is learned. The best plans are tried with "
        "random weights and made-up rows; after the first, no trial begins that would end later than 90 s after the "
        "start",
        flag="--tune-params",
    )
    mem_frac: float = setting(
        0.9,
        help="Share of a device's memory that the chosen settings may take",
        gt=0,
        le=1,
        only_with=_TUNED,
        flag="--mem-frac",
    )
    max_samples: int = setting(
        256,
        help="Most samples decoded at once, and samples of a step if train_dataset.batch_size is chosen",
        gt=0,
        only_with=_TUNED,
        flag="--tune-max-samples",
    )
