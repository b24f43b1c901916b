"""Checks of the reward: the user's functions on answers whose worth is known, called as a run calls them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from areno.checks.agent_rewards import pool_of_one, rewards_of_episodes, score
from areno.checks.inputs.answer_forms import reference_forms, reference_text, reopened_forms, templates_of
from areno.checks.inputs.findings import Finding, NotChecked, examples, green, not_checked, quoted, red
from areno.checks.inputs.known_answers import NOISE, Asked, KnownAnswers
from areno.checks.inputs.subject import Subject
from areno.checks.plans import rollout_seconds
from areno.checks.reward_findings import (
    AGAIN,
    Answers,
    Tried,
    continuation_finding,
    failures_finding,
    reference_finding,
    repeated_finding,
    shown_means,
    signal_finding,
)
from areno.checks.reward_trials import each_row, has_trait, try_answers
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.scoring.judge import JudgeTask, Judging
from areno.scoring.judge_readers import EndpointJudge
from areno.scoring.records import record_of_completion
from areno.types import PromptItem, RewardOutcome, RewardRecord
from areno.user_processes.pool import default_workers

_N_PROMPTS = 16  # of each source
_BLOCK = 4  # rows that follow each other, so that a reward of the next row is found
_PROBES = 3  # requests with which a judge is opened
_SHOWN = 3
_MOST_UNREACHED = 0.1  # of the reference answers
_MOST_ROWS = 200  # whose reference answer is tried in its best form
_ROWS_SECONDS = 5.0
_SLOW_S = 0.05  # for an answer: answers of agents may be scored by programs


def reward_functions(subject: Subject) -> Iterator[Finding]:
    """Score answers whose worth is known, in two processes."""
    if isinstance(subject.config, PolicyExperimentConfig) and subject.config.agent.fn is not None:
        yield from rewards_of_episodes(subject)
        yield from _of_short_episodes(subject)
        return
    config = _policy_config(subject)
    if subject.options.offline and _is_async(subject):
        raise NotChecked("an async function may ask a server (--offline)")
    for source, answers in _answers_by_source(subject).items():
        where = f"source {source}: " if source else ""
        records = [record for kind in answers.texts for record in _records(subject, answers, kind)]
        first, seconds = _score(subject, records)
        again = list(reversed(_score(subject, list(reversed(records)))[0]))
        yield failures_finding(where, records, first)
        yield (repeated := repeated_finding(where, records, first, again))
        tried = _by_kind(answers, first)
        if repeated.verdict == "red":
            yield not_checked("reward-signal", f"{where}rewards are not repeatable: see {repeated.name}")
        else:
            yield signal_finding(where, tried, answers, subject.tokenizer.chat_template is not None)
        yield from continuation_finding(where, tried)
        yield from reference_finding(where, tried, answers.forms)
        yield from _reach(subject, where, config, answers, tried)
        if answers.best:
            known = _known_answers(subject, source, where, answers, tried)
            yield from try_answers(known, lambda asked: _score_texts(subject, asked))
            yield from _each_row(
                subject, source, known, min(_MOST_ROWS, int(_ROWS_SECONDS * len(records) / max(seconds, 1e-9)))
            )
        yield _speed(subject, where, seconds / len(records))


def _of_short_episodes(subject: Subject) -> Iterator[Finding]:
    """Score answers of agents without a call of a tool. A reward that reads only those gives a right one nothing."""
    if _is_async(subject):
        return
    for source, answers in _answers_by_source(subject).items():
        where = f"source {source}: " if source else ""
        records = [record for kind in answers.texts for record in _records(subject, answers, kind)]
        first, seconds = _score(subject, records)
        tried = _by_kind(answers, first)
        means = {each.kind: each.mean for each in tried}
        if means.get("reference", math.nan) > max(means["empty"], means["noise"]):
            known = _known_answers(subject, source, where, answers, tried)
            if seconds / len(records) > _SLOW_S:
                continue
            yield from reference_finding(where, tried, answers.forms)
            yield from try_answers(known, lambda asked: _score_texts(subject, asked))


def judge(subject: Subject) -> Iterator[Finding]:
    """Ask the judge a few times about answers whose worth is known."""
    config = subject.config
    if not isinstance(config, PolicyExperimentConfig) or not config.reward.judge.is_set:
        return
    section = config.reward.judge
    if section.path is not None:
        raise NotChecked("the judge is a model that the run loads; serve it and set reward.judge.base_url to check it")
    if subject.options.offline:
        raise NotChecked("--offline: the judge is not asked")
    n_prompts = max(1, (subject.options.n_calls - _PROBES) // 2)
    subject.announce(f"asks the judge {section.model} at {section.base_url} at most {2 * n_prompts + _PROBES} times")
    section = replace(section, retries=0)
    items = _items(subject, "", n_prompts)
    texts = {"reference": [reference_text(item) or NOISE for item in items], "noise": [NOISE] * len(items)}
    answers = Answers(items, texts)
    pairs = [(item, kind) for item in range(len(items)) for kind in texts]
    records = [_record(subject, items[number], texts[kind][number]) for number, kind in pairs]
    tasks = [JudgeTask(range(at - at % 2, at - at % 2 + 2), record.messages[:-1]) for at, record in enumerate(records)]
    with EndpointJudge(section) as reader, Judging(section, reader, tasks.__getitem__) as judging:
        judging.add(dict(enumerate(records)))
        outcomes = judging.collect_outcomes()
    values = [outcomes[at].value for at in range(len(records))]
    tried = [Tried(kind, values[number :: len(texts)]) for number, kind in enumerate(answers.texts)]
    lost = [outcome.message for _, outcome in sorted(outcomes.items()) if outcome.value is None]
    if lost:
        yield red("judge-answers", f"{len(lost)} of {len(records)} answers have no score of the judge", examples(lost))
    else:
        yield green("judge-answers", f"the judge gives each of {len(records)} answers a score")
    known = {value for value in values if value is not None}
    if len(known) == 1:
        yield red("judge-signal", f"the judge gives every answer {known.pop():g}", shown_means(tried))
    elif len(known) > 1:
        yield green("judge-signal", f"the judge's scores go from {min(known):g} to {max(known):g}", shown_means(tried))


def _known_answers(subject: Subject, source: str, where: str, answers: Answers, tried: Sequence[Tried]) -> KnownAnswers:
    values = {each.kind: each.values for each in (*tried, *answers.forms)}
    worthless = [
        max((value for value in pair if value is not None), default=0.0)
        for pair in zip(values["empty"], values["noise"], strict=True)
    ]
    return KnownAnswers(
        where=where,
        items=answers.items,
        references=[reference_text(item) for item in answers.items],
        forms=reference_forms(answers.items),
        rewards={each.kind: each.values for each in answers.forms},
        best=answers.best,
        templates=templates_of(answers.items),
        worthless=worthless,
        tokenizer=subject.tokenizer,
        settings=_policy_config(subject).gconfig_of(source),
    )


def _score_texts(subject: Subject, asked: Sequence[Asked]) -> list[RewardOutcome]:
    return _score(subject, [_record(subject, item, text) for item, text in asked])[0] if asked else []


def _each_row(subject: Subject, source: str, known: KnownAnswers, most: int) -> Iterator[Finding]:
    """Try the reference answers of many rows: half of them evenly chosen, half with odd answers."""
    rows = [item for item in _all_items(subject, source) if reference_text(item)]
    odd = [item for item in rows if has_trait(reference_text(item))]
    chosen = {id(item): item for part in (rows, odd) for item in part[:: max(1, -(-2 * len(part) // max(1, most)))]}
    asked = list[Asked]()
    for item in chosen.values():
        text = known.best.format(reference_text(item)) if known.best in known.templates else item.record.get(known.best)
        asked += [(item, text)] if isinstance(text, str) else []
    items = [item for item, _ in asked]
    references = [reference_text(item) for item in items]
    yield from each_row(known.where, items, references, max(known.worthless), _score_texts(subject, asked), rows)


def _policy_config(subject: Subject) -> PolicyExperimentConfig:
    config = subject.config
    if not isinstance(config, PolicyExperimentConfig):
        raise NotChecked("the run has no reward: it trains on the answers of its rows")
    if config.reward.fn is None and not any(config.train_dataset.reward_by_source.values()):
        raise NotChecked("no function gives the reward (reward.fn is null)")
    return config


def _items(subject: Subject, source: str, most: int) -> list[PromptItem]:
    """Return prompts of a source: blocks of rows that follow each other, from several places."""
    found, rows, n_blocks = list[PromptItem](), _all_items(subject, source), max(1, most // _BLOCK)
    for number in range(n_blocks):
        start = number * max(0, len(rows) - _BLOCK) // n_blocks
        found += rows[start : start + _BLOCK]
    return found[:most]


def _all_items(subject: Subject, source: str) -> list[PromptItem]:
    return [
        row.item
        for dataset in subject.training_rows
        if dataset.source == source or not source
        for row in subject.rows_of(dataset)
        if row.item is not None
    ]


def _answers_by_source(subject: Subject) -> dict[str, Answers]:
    found, pool = {}, pool_of_one(_policy_config(subject))
    for dataset in subject.training_rows:
        if not pool.scores(dataset.source):
            continue
        items = _items(subject, dataset.source, _N_PROMPTS)
        found[dataset.source] = Answers(items, *_texts(subject, items))
    if not found:
        raise NotChecked("no source has a reward function")
    return found


def _texts(subject: Subject, items: Sequence[PromptItem]) -> tuple[dict[str, list[str]], list[Tried], str]:
    """Return (kind of answer -> a text for each prompt, rewards of the reference answers in each form, the best form).

    The reference is in the form that gets the largest rewards.
    """
    texts = {"empty": [""] * len(items), "noise": [NOISE] * len(items)}
    forms = reference_forms(items)
    if not forms:
        return texts, [], ""
    again = reopened_forms(items)
    tried = Answers(list(items), forms | again)
    records = [record for kind in tried.texts for record in _records(subject, tried, kind)]
    rewards = _by_kind(tried, _score(subject, records)[0])
    rewards, of_again = rewards[: len(forms)], rewards[len(forms) :]
    best = max(rewards, key=_mean)
    references = forms[best.kind]
    found = {
        "reference": references,
        "cut off": [text[: len(text) // 2] for text in references],
        "repeated": [" ".join([text] * 20) for text in references],
        "of the next row": [*references[1:], references[0]],
        "of the row before": [references[-1], *references[:-1]],
    }
    found |= {AGAIN: again[max(of_again, key=_mean).kind]} if of_again else {}
    return found | texts, rewards, best.kind


def _mean(tried: Tried) -> float:
    return -math.inf if math.isnan(tried.mean) else tried.mean


def _records(subject: Subject, answers: Answers, kind: str) -> list[RewardRecord]:
    pairs = zip(answers.items, answers.texts[kind], strict=True)
    return [_record(subject, item, text, ends=kind != "cut off") for item, text in pairs]


def _record(subject: Subject, item: PromptItem, text: str, ends: bool = True) -> RewardRecord:
    """Make the record of a completion, as the run makes it of sampled tokens."""
    tokenizer = subject.tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    tokens += [min(subject.end_ids)] * (ends and bool(subject.end_ids))
    rendered = tokenizer.decode(tokens, skip_special_tokens=False)
    return record_of_completion(item, tokens, [0.0] * len(tokens), text, rendered, step=0)


def _score(subject: Subject, records: Sequence[RewardRecord]) -> tuple[list[RewardOutcome], float]:
    return score(_policy_config(subject), records)


def _is_async(subject: Subject) -> bool:
    with pool_of_one(_policy_config(subject)) as pool:
        pool.wait_ready()
        return any(worker.is_async for worker in pool.workers)


def _by_kind(answers: Answers, outcomes: Sequence[RewardOutcome]) -> list[Tried]:
    n = len(answers.items)
    parts = [outcomes[start : start + n] for start in range(0, len(outcomes), n)]
    return [Tried(kind, [outcome.value for outcome in part]) for kind, part in zip(answers.texts, parts, strict=True)]


def _reach(
    subject: Subject, where: str, config: PolicyExperimentConfig, answers: Answers, tried: Sequence[Tried]
) -> Iterator[Finding]:
    """Check that reference answers have a place within max_new_tokens."""
    if "reference" not in answers.texts:
        return
    most, tokenizer = config.gconfig.max_new_tokens, subject.tokenizer
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in answers.texts["reference"]]
    long = [at for at, tokens in enumerate(encoded) if len(tokens) + 1 > most]
    name, n = "reward-reach", len(encoded)
    if not long:
        longest = max(map(len, encoded))
        yield green(name, f"{where}reference answers have at most {longest} tokens, of {most} (gconfig.max_new_tokens)")
        return
    cut = Answers([answers.items[at] for at in long], {"cut": [tokenizer.decode(encoded[at][:most]) for at in long]})
    scored = _score(subject, _records(subject, cut, "cut"))[0]
    whole = next(each for each in tried if each.kind == "reference").values
    lost = [
        at
        for at, outcome in zip(long, scored, strict=True)
        if outcome.value is not None and whole[at] is not None and outcome.value < (whole[at] or 0.0)
    ]
    text = f"{where}{len(lost)} of {n} reference answers are right only beyond {most} tokens (gconfig.max_new_tokens)"
    details = [f"{quoted(answers.texts['reference'][at])} has {len(encoded[at])} tokens" for at in lost[:_SHOWN]]
    yield (red if len(lost) > _MOST_UNREACHED * n else green)(name, text, details)


def _speed(subject: Subject, where: str, seconds: float) -> Finding:
    config = _policy_config(subject)
    n_samples, workers = config.rows_per_step, config.reward.workers or default_workers(config.engine.world_size or 1)
    step_s = seconds * n_samples / workers
    text = f"{where}{1000 * seconds:.2g} ms for an answer, {step_s:.2g} s for the {n_samples} of a step"
    text += f" with {workers} process{'es' * (workers > 1)}"
    rollout_s, device = rollout_seconds(subject)
    if rollout_s is None:
        return green("reward-speed", text)
    slow = " The step waits for rewards: raise reward.workers." if step_s > rollout_s else ""
    return green("reward-speed", f"{text}; the rollout takes {rollout_s:.2g} s on {device}.{slow}")
