"""Checks of what agents send: messages that tell the answer, lost answers of the model, and other temperatures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.checks.inputs.answer_forms import reference_text
from areno.checks.inputs.findings import Finding, NotChecked, examples, green, not_checked, quoted, red
from areno.checks.inputs.subject import Subject
from areno.checks.inputs.talks import text_of
from areno.checks.steps.two_steps import two_steps
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.types import PromptItem, SamplingParams, ScoredSample

_MOST_TOLD = 0.5  # of the episodes in which a message has the row's answer, more than have that of another row
_WORKED = ("answer", "solution", "solutions", "response", "output", "reasoning", "ground_truth", "target", "label")
_LEAST_WORK = 12  # characters of a text that no message has by chance
_LEAST = 2  # episodes
_FEW = 0.5  # of the episodes


@dataclass(frozen=True)
class _Episode:
    item: PromptItem
    turns: Sequence[Mapping[str, Any]]

    @property
    def sent(self) -> list[str]:
        """The texts of users and systems that the agent has sent, without those of the row."""
        own = [self.item.prompt, *(text_of(message) for message in self.item.messages or ())]
        found = dict[str, None]()
        for turn in self.turns:
            for message in turn["messages"]:
                text = text_of(message) if message.get("role") not in ("assistant", "tool") else ""
                for each in own:
                    text = text.replace(each, "") if each else text
                if text.strip():
                    found[text] = None
        return list(found)


def agent_messages(subject: Subject) -> Iterator[Finding]:
    """Look at the requests of agents in two steps on the small model."""
    config = subject.config
    if not isinstance(config, PolicyExperimentConfig) or config.agent.fn is None:
        return
    if (steps := two_steps(subject)) is None:
        return
    samples: list[ScoredSample] = [each for of_step in steps.run.samples.values() for each in of_step]
    episodes = [_Episode(each.item, each.trajectory.turns) for each in samples if each.trajectory is not None]
    if not episodes:
        raise NotChecked("no agent has ended with an episode")
    yield from _told_answers(episodes)
    yield from _history(episodes)
    yield from _sampling(steps.run, config)


def _told_answers(episodes: Sequence[_Episode]) -> Iterator[Finding]:
    known = [each for each in episodes if _answers_of(each.item)]
    if not known:
        yield not_checked("told-answers", "the rows have no answers that a message could tell")
        return
    told, by_chance = list[str](), 0
    for episode in known:
        prompt, sent = _spaced(episode.item.prompt), list(map(_spaced, episode.sent))
        own = [text for text in _answers_of(episode.item) if text not in prompt]
        others = {text for each in known for text in _answers_of(each.item)} - set(_answers_of(episode.item))
        found = next((at for at, text in enumerate(sent) if any(answer in text for answer in own)), None)
        by_chance += any(answer in text for answer in others if answer not in prompt for text in sent)
        if found is not None:
            message, answer = quoted(episode.sent[found], 120), own[0].strip()[:40]
            told.append(f"row {episode.item.index}: {message}; its answer: {answer}")
    text = f"in {len(told)} of {len(known)} episodes, a message of the agent contains the answer of the row"
    is_told = len(told) >= _LEAST and len(told) - by_chance > _MOST_TOLD * len(known)
    if is_told:
        yield red("told-answers", f"{text}: the model would only copy it", examples(told))
    else:
        yield green("told-answers", f"{text} ({by_chance}: that of another row)", examples(told))


def _answers_of(item: PromptItem) -> list[str]:
    """Return the short answer of a row and its worked ones, each as words between spaces."""
    given = [reference_text(item), *(item.record.get(name) for name in _WORKED if name in item.record)]
    texts = [str(each) for each in given if isinstance(each, str | int | float) and not isinstance(each, bool)]
    found = [_spaced(text) for number, text in enumerate(texts) if number == 0 or len(text) >= _LEAST_WORK]
    return [text for text in dict.fromkeys(found) if text.strip()]


def _spaced(text: str) -> str:
    plain = "".join(char if char.isalnum() or char in "-." else " " for char in text.lower())
    return f" {' '.join(word.strip('.') for word in plain.split())} "


def _history(episodes: Sequence[_Episode]) -> Iterator[Finding]:
    """Look for agents whose later requests lack what the model has answered before."""
    longer = [each for each in episodes if len(each.turns) > 1]
    lost = [each for each in longer if _is_lost(each.turns[0], each.turns[1])]
    if len(lost) > _FEW * len(longer):
        text = f"in {len(lost)} of {len(longer)} episodes, the second request has no message of the assistant"
        why = "the model does not see what it has answered. This is right only for separate conversations"
        yield not_checked("agent-history", f"{text}: {why}")


def _is_lost(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    roles = [[message.get("role") for message in turn["messages"]] for turn in (first, second)]
    return roles[1].count("assistant") <= roles[0].count("assistant")


def _sampling(run: Any, config: PolicyExperimentConfig) -> Iterator[Finding]:
    """Compare the temperature of requests with that of the run."""
    own = SamplingParams.of(config.gconfig)
    turns = [turn for of_step in run.episodes.turns.values() for turn in of_step if not turn.is_forced]
    greedy = sum(turn.is_greedy for turn in turns)
    others = sorted({turn.temperature for turn in turns} - {own.logprob_temperature})
    name, n = "agent-sampling", len(turns)
    if greedy > _FEW * n and not own.is_greedy:
        text = f"agents sent {greedy} of {n} requests with temperature 0: all samples of a prompt are the same"
        yield red(name, f"{text}, so that their advantages are 0. Leave out the temperature of requests")
    elif others:
        asked = ", ".join(f"{each:g}" for each in others)
        text = f"agents ask at temperature {asked}, and training is at gconfig.temperature={own.logprob_temperature:g}"
        yield red(name, f"{text}: ratios are wrong. Leave out the temperature of requests")
    elif n:
        yield green(name, f"{n} requests have the temperature of gconfig")
