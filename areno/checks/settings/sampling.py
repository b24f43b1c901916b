"""Checks of what the rollout can sample, and of what becomes of its rewards."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from areno.checks.formulas.advantage_formulas import shaped_rewards
from areno.checks.inputs.answer_forms import reference_forms
from areno.checks.inputs.findings import Finding, green, red
from areno.checks.inputs.subject import Subject
from areno.config.policy_experiments import PolicyExperimentConfig

_COLDEST, _HOTTEST = 0.1, 3.0
_LEAST_TOP_P, _MOST_MIN_P = 0.1, 0.9
_MOST_PENALISED = 0.9  # of the lengths of completions
_MOST_PENALTY = 10.0  # of a reward that a right answer gets
_MOST_CUT = 0.9  # of the worked solutions
_ROWS = 200


def sampling(subject: Subject) -> Iterator[Finding]:
    """Whether samples of a prompt differ, are no noise, and can end."""
    config = subject.config
    if not isinstance(config, PolicyExperimentConfig) or not config.needs_rewards:
        return
    given, wrong = config.gconfig, list[str]()
    equal = "all samples of a prompt are nearly equal, so their rewards teach nothing"
    if given.is_greedy or given.temperature < _COLDEST:
        wrong.append(f"gconfig.temperature={given.temperature:g}{', greedy=true' * given.greedy}: {equal}")
    elif given.top_k == 1 or given.top_p < _LEAST_TOP_P or given.min_p > _MOST_MIN_P:
        how = f"top_k={given.top_k}, top_p={given.top_p:g}, min_p={given.min_p:g}"
        wrong.append(f"gconfig: {how} leave the most likely token alone: {equal}")
    if given.temperature >= _HOTTEST:
        wrong.append(f"gconfig.temperature={given.temperature:g}: completions are noise")
    if given.ignore_eos or given.min_new_tokens >= given.max_new_tokens > 1:
        how = "ignore_eos=true" if given.ignore_eos else f"min_new_tokens={given.min_new_tokens}"
        wrong.append(f"gconfig.{how}: no completion ends before max_new_tokens={given.max_new_tokens}")
    if wrong:
        yield from (red("sampling", text) for text in wrong)
    else:
        yield green("sampling", f"temperature {given.temperature:g}, and completions can end")


def reward_shaping(subject: Subject) -> Iterator[Finding]:
    """Whether the settings of rewards keep a right answer above a wrong one, and long answers within reach."""
    config = subject.config
    if not isinstance(config, PolicyExperimentConfig) or not config.needs_rewards:
        return
    actor, most, wrong = config.actor, config.gconfig.max_new_tokens, list[str]()
    right, bad = shaped_rewards([1.0, 0.0], [1, 1], actor, most)
    how = f"reward_bias={actor.reward_bias:g}, reward_scaling={actor.reward_scaling:g}, reward_clip={actor.reward_clip}"
    if right < bad:
        wrong.append(f"actor: {how}: a reward of 1 becomes {right:g} and one of 0 becomes {bad:g}, the better one")
    elif right == bad:
        wrong.append(f"actor: {how}: rewards of 1 and of 0 both become {right:g}, so nothing is learned")
    if actor.overlong_reward_penalty and actor.overlong_tokens and actor.overlong_penalty_factor:
        if actor.overlong_tokens > _MOST_PENALISED * most:
            text = f"actor.overlong_tokens={actor.overlong_tokens} of gconfig.max_new_tokens={most}"
            wrong.append(f"{text}: the penalty for long completions begins at {most - actor.overlong_tokens} tokens")
        if actor.overlong_penalty_factor > _MOST_PENALTY:
            text = f"actor.overlong_penalty_factor={actor.overlong_penalty_factor:g}"
            wrong.append(f"{text}: the penalty for long completions dwarfs the reward of a right answer")
    if wrong:
        yield from (red("reward-shaping", text) for text in wrong)
    else:
        yield green("reward-shaping", f"a reward of 1 becomes {right:g}, and one of 0 becomes {bad:g}")


def answer_room(subject: Subject) -> Iterator[Finding]:
    """Whether completions have room for answers such as the worked solutions of the rows."""
    config = subject.config
    if not isinstance(config, PolicyExperimentConfig) or config.agent.fn is not None or not config.needs_rewards:
        return
    for dataset in subject.training_rows:
        items = [row.item for row in subject.sample_of(dataset, _ROWS) if row.item is not None]
        worked = {name: texts for name, texts in reference_forms(items).items() if "{}" not in name} if items else {}
        most = config.gconfig_of(dataset.source).max_new_tokens
        for name, texts in worked.items():
            lengths = [len(tokens) for tokens in subject.tokenizer(texts, add_special_tokens=False)["input_ids"]]
            n_cut, usual = sum(length > most for length in lengths), statistics.median(lengths)
            text = (
                f"{dataset.key}: {n_cut} of {len(texts)} texts in {name} are longer than gconfig.max_new_tokens={most}"
            )
            text += f"; the median has {usual:g} tokens"
            yield (red if n_cut > _MOST_CUT * len(texts) else green)("answer-room", text)


CHECKS = (sampling, reward_shaping, answer_room)
