"""The phases of a training step in a forecast, and the lengths and rows that their time and memory follow from.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from areno.config.experiments import ExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig

_CHARS_PER_TOKEN = 4  # of the text of a judge's question


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths that a forecast assumes, in tokens.

    Attributes:
        prompt: Tokens of a prompt.
        answer: Tokens of an answer, on average.
    """

    prompt: int
    answer: int

    @staticmethod
    def of(config: ExperimentConfig, context_len: int, prompt: int | None, answer: int | None) -> Lengths:
        """Return the given lengths. A length that is None is the limit that the settings give, at most 512 for prompts.

        Args:
            config: Settings of the run.
            context_len: Context length of the model.
            prompt: Tokens of a prompt, or None.
            answer: Tokens of an answer, or None.
        """
        limit = min(config.train_dataset.max_length, context_len)
        if not isinstance(config, PolicyExperimentConfig):
            prompt = min(limit, 512) // 2 if prompt is None else prompt
            return Lengths(prompt=prompt, answer=prompt if answer is None else answer)
        prompt = min(limit, 512) if prompt is None else prompt
        most = min(config.gconfig.max_new_tokens, max(1, context_len - prompt))
        return Lengths(prompt=prompt, answer=most if answer is None else answer)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The number and lengths of the token sequences (rows) that a model scores or trains on in a step.

    Attributes:
        n: Number of rows on all devices together.
        lengths: Number of tokens of the prompt and of the answer of a row.
        n_same: Number of rows with the same prompt, which may be computed only once.
    """

    n: int
    lengths: Lengths
    n_same: int

    @property
    def each(self) -> int:
        """Number of tokens of a row."""
        return self.lengths.prompt + self.lengths.answer


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of a training step.

    Attributes:
        name: Name, such as "rollout" or "train actor".
        clock: Name of the phase in the scalars time/* and memory/* of a run.
        seconds: Expected time.
        terms: Bytes on a device, by what takes them. Their sum is the expected peak of the phase.
        n_tokens: Tokens that the phase generates, scores or trains, over all devices.
        budget: Largest number of tokens in a micro-batch. None for a phase that decodes.
        least: Bytes on a device that the phase needs at least. If they do not fit, the phase runs out of memory.
    """

    name: str
    clock: str
    seconds: float
    terms: dict[str, int]
    n_tokens: float
    budget: int | None = None
    least: int = 0

    @property
    def decodes(self) -> bool:
        """Whether a model samples tokens in the phase, rather than scoring or training rows."""
        return self.budget is None

    @property
    def peak(self) -> int:
        """The expected peak of memory, in bytes."""
        return sum(self.terms.values())


def rows_of_step(config: ExperimentConfig) -> int:
    """Return the number of rows that a step trains on.

    Args:
        config: Settings of the run.
    """
    if isinstance(config, PolicyExperimentConfig):
        return config.train_dataset.batch_size * config.trained_per_prompt
    return config.train_dataset.batch_size * config.rows_per_item()


def questions_of_step(config: PolicyExperimentConfig, lengths: Lengths) -> Rows:
    """Return the questions to the judge in a step. The answer of a row is a label, or the longest reply in JSON.

    Args:
        config: Settings of the run.
        lengths: The assumed lengths of prompts and completions.
    """
    judge = config.reward.judge
    question = len(judge.question) // _CHARS_PER_TOKEN + lengths.prompt + (1 + judge.compare) * lengths.answer
    n_questions = config.train_dataset.batch_size * judge.n_questions(config.gconfig.n_samples)
    answer = judge.max_tokens if judge.verdict == "json" else 1
    return Rows(n=n_questions, lengths=Lengths(prompt=question, answer=answer), n_same=1)
