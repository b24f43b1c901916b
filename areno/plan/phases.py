"""The phases of a training step in a forecast, and the lengths and numbers of rows on which they depend.

`decoder_concurrency` returns the numbers of samples that are decoded at once. `compare_with_recorded` compares the
forecast with the time and the peak memory that a run has recorded. Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from areno.config.experiments import ExperimentConfig
from areno.config.layout import Layout
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.config.teacher import is_teacher
from areno.cost.memory import PassBytes
from areno.models.config import TransformerConfig
from areno.specs.rollout import DecoderConcurrency

STEP = "step"
_CHARS_PER_TOKEN = 4  # of the text of a judge's question
_MOST_EVALUATED = 512  # samples for each copy of the model: their logits still take little memory


@dataclass(frozen=True, kw_only=True)
class SequenceLengths:
    """The lengths in tokens that a forecast assumes: of a prompt, and the mean of an answer."""

    prompt: int
    answer: int

    @staticmethod
    def from_settings(
        config: ExperimentConfig, context_len: int, prompt: int | None, answer: int | None
    ) -> SequenceLengths:
        """Return `prompt` and `answer`. For None, take the limit in the settings (for a prompt, at most 512)."""
        limit = min(config.train_dataset.max_length_or_unlimited, context_len)
        if not isinstance(config, PolicyExperimentConfig):
            prompt = min(limit, 512) // 2 if prompt is None else prompt
            return SequenceLengths(prompt=prompt, answer=prompt if answer is None else answer)
        prompt = min(limit, 512) if prompt is None else prompt
        most = min(config.gconfig.max_new_tokens, max(1, context_len - prompt))
        return SequenceLengths(prompt=prompt, answer=most if answer is None else answer)


@dataclass(frozen=True, kw_only=True)
class RowWorkload:
    """The number and lengths of the token sequences (rows) that a model scores or trains on in a step."""

    n: int  # on all devices together
    lengths: SequenceLengths
    n_same: int  # rows with the same prompt, which may be computed only once

    @property
    def tokens_per_row(self) -> int:
        """Number of tokens of a row."""
        return self.lengths.prompt + self.lengths.answer


@dataclass(frozen=True, kw_only=True)
class Phase:
    name: str  # such as "rollout" or "train actor"
    clock: str  # its name in the scalars time/* and memory/* of a run
    seconds: float
    terms: dict[str, int]  # bytes on a device, by what takes them
    n_tokens: float  # generated, scored or trained, over all devices
    budget: int | None = None  # tokens of a micro-batch; None for a phase that decodes
    least: int = 0  # bytes on a device that the phase needs at least
    host_bytes: int = 0  # of each device, for the inputs of layers in a training pass

    @property
    def decodes(self) -> bool:
        return self.budget is None

    @property
    def peak_memory_bytes(self) -> int:
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """The memory of a pass over a micro-batch."""

    terms: dict[str, int]  # as those of a Phase
    n_recomputed: int  # layers
    least: int  # bytes if all layers recompute, and keep their inputs in host memory if necessary
    host_bytes_of_token: int  # inputs of layers in host memory
    frees_cache: bool

    @staticmethod
    def from_terms(
        terms: Mapping[str, int],
        need: PassBytes,
        n_tokens: int,
        n_predicted: int,
        n_layers: int,
        room: int | None,
        cache: tuple[int, bool],
    ) -> PassMemory:
        """Return the memory of a pass beside other terms. `n_layers`: those that may recompute.

        With `room`, the pass keeps as many activations as fit into these bytes, or moves inputs of layers to the host.
        `cache`: the bytes of the KV cache, and whether it may be freed if the pass does not fit beside it.
        """
        n_kept = n_offloaded = 0
        cache_bytes, may_free = cache
        frees = False
        if cache_bytes and room is not None:
            all_away = need.offloading(n_layers, n_layers) if n_layers else need
            frees = may_free and n_layers > 0 and all_away.expected(n_tokens, 0, n_predicted) > room - cache_bytes
            room -= 0 if frees else cache_bytes
        if cache_bytes and not frees:
            terms = {**terms, "KV cache": cache_bytes}
        if room is not None and n_layers:
            n_kept = need.fitting_layers(n_tokens, room, n_layers)
            n_offloaded = 0 if n_kept else need.layers_to_offload(n_tokens, room, n_layers)
        least = need
        if n_offloaded:
            need, least = need.offloading(n_layers, n_offloaded), need.offloading(n_layers, n_layers)
        return PassMemory(
            terms={**terms, "activations": need.expected(n_tokens, n_kept, n_predicted)},
            n_recomputed=n_layers - n_kept,
            least=sum(terms.values()) + least.expected(n_tokens, 0, n_predicted),
            host_bytes_of_token=n_offloaded * need.of_inputs,
            frees_cache=frees,
        )


def decoder_concurrency(
    config: PolicyExperimentConfig, model: TransformerConfig, layout: Layout, n_prompts: int | None = None
) -> DecoderConcurrency | None:
    """Return how many samples training and evaluation decode at the same time. None if the numbers are equal.

    An evaluation may decode more samples at once than a training step has. This changes its samples only by rounding,
    and not at all with engine.exact. The numbers are equal if agents live across steps, or if recurrent states take
    memory for each sample that may run. `n_prompts`: number of prompts in an evaluation. If None, the settings give an
    upper limit.
    """
    are_live = config.agent.fn is not None and config.rollout.max_head_offpolicyness > 0
    if config.rollout.max_concurrent_rollouts is not None or model.delta is not None or are_live:
        return None
    usual, most = config.rows_per_step, _MOST_EVALUATED * layout.dp_size
    if n_prompts is None:
        sets = config.valid_dataset.by_name().values() if config.valid_dataset is not None else ()
        n_prompts = max((min(each.batch_size or most, each.max_rows or most) for each in sets), default=0)
    most = min(most, n_prompts * (config.eval_gconfig or config.gconfig).n_samples)
    return DecoderConcurrency(usual=usual, most=most) if most > usual else None


def rows_of_step(config: ExperimentConfig) -> int:
    return config.items_per_step * config.rows_per_item()


def rows_of_role(config: ExperimentConfig, lengths: SequenceLengths, name: str, roles: Collection[str]) -> RowWorkload:
    """Return the rows that a model scores or is trained on in a step. A judge gets a row per label of each question."""
    n_rows = rows_of_step(config)
    if not isinstance(config, PolicyExperimentConfig):
        return RowWorkload(n=n_rows, lengths=lengths, n_same=1)
    if name == "reward":
        return RowWorkload(n=config.rows_per_step, lengths=lengths, n_same=config.gconfig.n_samples)
    if is_teacher(name):  # the fields of rows are not read, so that each teacher is assumed to have as many
        n_rows = -(-n_rows // sum(map(is_teacher, roles)))
    if name != "judge":
        return RowWorkload(n=n_rows, lengths=lengths, n_same=config.trained_samples_per_prompt)
    asked, n_labels = questions_of_step(config, lengths), len(config.reward.judge.label_names)
    return replace(asked, n=asked.n * n_labels, n_same=n_labels)


def values_per_token(config: ExperimentConfig) -> int:
    """Return how many numbers, such as log-probabilities, the host packs per token of a row to train on."""
    if not isinstance(config, PolicyExperimentConfig):
        return 1
    return 6 if isinstance(config, CriticExperimentConfig) else 4


def questions_of_step(config: PolicyExperimentConfig, lengths: SequenceLengths) -> RowWorkload:
    """Return the questions to the judge in a step as rows. The answer is one label, or the longest JSON reply."""
    judge = config.reward.judge
    question = len(judge.question_template) // _CHARS_PER_TOKEN + lengths.prompt + (1 + judge.compare) * lengths.answer
    n_questions = config.train_dataset.batch_size * judge.n_questions(config.gconfig.n_samples)
    answer = judge.max_tokens if judge.verdict == "json" else 1
    return RowWorkload(n=n_questions, lengths=SequenceLengths(prompt=question, answer=answer), n_same=1)


@dataclass(frozen=True, kw_only=True)
class ComparedPhase:
    """The predicted and the measured time and memory of a phase, or of the whole step (name "step")."""

    name: str
    seconds: tuple[float, float]  # (predicted, median of the measured)
    gib: tuple[float, float]  # (predicted peak of memory, largest measured peak)

    def __str__(self) -> str:
        of_seconds = " / ".join(f"{value:.3g}" for value in self.seconds)
        return f"{self.name} {of_seconds} s, peak {self.gib[0]:.2f} / {self.gib[1]:.2f} GiB"


def measured_lengths(config: ExperimentConfig, metrics: Mapping[str, Sequence[float]]) -> tuple[int, int] | None:
    """Return the mean (tokens of a prompt, tokens of an answer) in the recorded steps, or None.

    A run without a rollout records no lengths. The number of trained tokens then gives the length of a row, and half of
    it counts as the prompt.
    """
    if isinstance(config, PolicyExperimentConfig):
        names = ("rollout/seq_len_mean", "rollout/response_len_mean")
        if any(not metrics.get(name) for name in names):
            return None
        row, answer = (statistics.fmean(metrics[name]) for name in names)
    else:
        speeds, seconds = metrics.get("train/tokens_per_second"), metrics.get("time/train")
        if not speeds or not seconds:
            return None
        n_tokens = [speed * time for speed, time in zip(speeds, seconds, strict=False)]
        row = statistics.fmean(n_tokens) / rows_of_step(config)
        answer = row / 2
    return max(1, round(row - answer)), max(1, round(answer))


def compare_with_recorded(phases: Sequence[Phase], metrics: Mapping[str, Sequence[float]]) -> list[ComparedPhase]:
    """Compare the phases of a forecast with the scalars that a run has recorded.

    Returns one item for each recorded phase, and one for the step. Its predicted time is the sum over these phases.
    """
    found = [each for phase in phases for each in _compare_phase(phase, metrics)]
    if not found or not metrics.get("time/step"):
        return []
    seconds = sum(each.seconds[0] for each in found), statistics.median(metrics["time/step"])
    gib = max(each.gib[0] for each in found), max(each.gib[1] for each in found)
    return [*found, ComparedPhase(name=STEP, seconds=seconds, gib=gib)]


def _compare_phase(phase: Phase, metrics: Mapping[str, Sequence[float]]) -> Iterator[ComparedPhase]:
    seconds, peaks = (metrics.get(f"{name}/{phase.clock}") for name in ("time", "memory"))
    if seconds and peaks:
        both = phase.seconds, statistics.median(seconds)
        yield ComparedPhase(name=phase.name, seconds=both, gib=(phase.peak_memory_bytes / 2**30, max(peaks)))
