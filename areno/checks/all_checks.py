"""The checks of a run, by group, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areno.checks import agent_messages, agent_tools, plans, rewards, short_runs
from areno.checks.data import (
    answers,
    belonging,
    broken_texts,
    columns,
    cuts,
    pair_differences,
    prompts,
    references,
    repeats,
    row_order,
    row_scores,
    rows,
    teacher_prompts,
    texts,
    tokenizers,
    turns,
)
from areno.checks.inputs.findings import Check
from areno.checks.settings import credit, run_length, sampling, strengths
from areno.checks.steps import algorithm, corrections, draws, gradient, groups, model_numbers, scalars, updates

CHECKS: Mapping[str, Sequence[Check]] = {
    "data": (
        *tokenizers.CHECKS,
        rows.forms_of_rows,
        rows.dropped_rows,
        columns.unused_columns,
        columns.row_flags,
        columns.swapped_columns,
        turns.turn_order,
        turns.written_calls,
        turns.undeclared_calls,
        belonging.own_answers,
        references.answers_of_texts,
        cuts.cut_texts,
        broken_texts.encoded_texts,
        broken_texts.filled_texts,
        answers.shown_rows,
        answers.trained_text,
        answers.repeated_prompts,
        answers.step_labels,
        texts.template_markers,
        texts.end_tokens,
        pair_differences.same_pairs,
        pair_differences.pair_marks,
        rows.rating_order,
        rows.given_answers,
        rows.same_answers,
        repeats.repeated_rows,
        repeats.contradictions,
        row_scores.labels,
        repeats.validation_form,
        prompts.prompt_end,
        prompts.serving,
        rows.validation_rows,
        row_scores.pair_scores,
        *teacher_prompts.CHECKS,
        *row_order.CHECKS,
    ),
    "reward": (
        rewards.reward_functions,
        rewards.judge,
        agent_messages.agent_messages,
        agent_tools.agent_tools,
        short_runs.groups_with_signal,
    ),
    "settings": (*run_length.CHECKS, *strengths.CHECKS, *credit.CHECKS, *sampling.CHECKS),
    "gradient": (*gradient.CHECKS, *updates.CHECKS),
    "algorithm": (
        *algorithm.CHECKS,
        *model_numbers.CHECKS,
        *draws.CHECKS,
        *corrections.CHECKS,
        *groups.CHECKS,
        *scalars.CHECKS,
    ),
    "plan": (plans.fits,),
    "resume": (short_runs.resume,),
}
