"""Checks of the tokenizer against the models of the run: the ids that it makes must be those that they have learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.inputs.small_model import folder_without_weights, model_values
from areno.checks.inputs.subject import Subject
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.errors import CheckpointError
from areno.files.paths import existing_path, name_model_setting_in_errors
from areno.models.folder import HUB_ID
from areno.plan.folders import load_tokenizer

_TEXTS, _CHARACTERS = 50, 400  # of rows, beside a text of many kinds of signs
_SIGNS = "The 3 numbers: 17 + 25 = 42, x**2 != 0.5e-3!\n\n\tdef f(x):\n        return {'a': [x]}  # été, 你好"
_SHOWN = 3
_LEAST_SHARE = 0.75  # of the ids of a model that its tokenizer has
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_END_KEYS = ("eos_token_id", "pad_token_id")


def model_tokenizer(subject: Subject) -> Iterator[Finding]:
    """Whether the tokenizer of the run makes the ids that the tokenizer of each model makes."""
    config, own, wrong, seen = subject.config, subject.tokenizer, list[Finding](), list[str]()
    paths = {"actor.path": config.actor.path}
    if isinstance(config, PolicyExperimentConfig) and config.reward.path is not None:
        paths["reward.path"] = config.reward.path
    for name in ("ref", "critic"):
        if (section := vars(config).get(name)) is not None and section.path is not None:
            paths[f"{name}.path"] = section.path
    for key, path in paths.items():
        with name_model_setting_in_errors(key):
            folder = _folder_of(path)
        given = "tokenizer_path" if config.tokenizer_path else "actor.path"
        if folder is not None and has_tokenizer(folder):
            if folder.resolve() != subject.tokenizer_folder.resolve():
                wrong += _other_ids(subject, load_tokenizer(str(folder)), given, key)
            seen.append(key)
            continue
        n_ids, n_own = model_values(path).get("vocab_size") or 0, len(own)
        if n_own < _LEAST_SHARE * n_ids:
            text = f"the tokenizer of {given} has {n_own:,} tokens, and {key} has {n_ids:,} ids"
            wrong.append(red("model-tokenizer", f"{text}, of which no other tokenizer is here: it is another model's"))
    yield from wrong
    if not wrong and seen:
        yield green("model-tokenizer", f"the tokenizer makes the ids of that of {', '.join(seen)}")
    elif not wrong:
        yield not_checked("model-tokenizer", f"the folder of {', '.join(paths)} has no tokenizer, or is not here")


def _folder_of(path: str) -> Path | None:
    """Return None for the id of a model that is not on this machine, if the hub cannot be reached."""
    try:
        return folder_without_weights(path)
    except CheckpointError:
        if existing_path(path) is None and HUB_ID.fullmatch(path):
            return None
        raise


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _VOCABULARIES)


def _other_ids(subject: Subject, other: Any, given: str, key: str) -> Iterator[Finding]:
    own, texts = subject.tokenizer, [_SIGNS, *_texts_of_rows(subject)]
    ours, theirs = (each(texts, add_special_tokens=False)["input_ids"] for each in (own, other))
    apart = [at for at, (one, two) in enumerate(zip(ours, theirs, strict=True)) if list(one) != list(two)]
    if apart:
        details = [f"{texts[at][:60]!r}: {ours[at][:8]} and {theirs[at][:8]}" for at in apart[:_SHOWN]]
        text = f"{len(apart)} of {len(texts)} texts have other ids by the tokenizer of {given} than by that of {key}"
        yield red("model-tokenizer", f"{text}: the model reads other words than the rows have", details)
        return
    ours, theirs = own.get_vocab(), other.get_vocab()
    for token in sorted({*own.all_special_tokens, *other.all_special_tokens, *own.get_added_vocab()}):
        if ours.get(token) != theirs.get(token) and token in theirs:
            text = f"{token!r} is {ours.get(token, 'no token')} by the tokenizer of {given} and {theirs[token]}"
            yield red("model-tokenizer", f"{text} by that of {key}")
            return


def _texts_of_rows(subject: Subject) -> list[str]:
    found = list[str]()
    for dataset in subject.training_rows:
        for row in subject.sample_of(dataset, _TEXTS):
            values = row.row.values() if isinstance(row.row, dict) else [row.row]
            found += [str(value)[:_CHARACTERS] for value in values if value is not None]
    return found[:_TEXTS]


def end_ids(subject: Subject) -> Iterator[Finding]:
    """Whether the ends and the padding that the files of the actor name are control tokens of the tokenizer."""
    own, wrong, shown = subject.tokenizer, list[Finding](), dict[str, str]()
    path = subject.config.actor.path
    control = {*own.all_special_ids, *own.added_tokens_decoder}
    for file, values in (("config.json", model_values(path)), ("generation_config.json", _generation(path))):
        for key in _END_KEYS:
            given = values.get(key)
            for number in given if isinstance(given, list) else [given]:
                if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                    continue
                token = own.convert_ids_to_tokens(number) if number < len(own) else None
                what = f"{key}={number} in {file} of actor.path"
                if token is None:
                    wrong.append(red("end-ids", f"{what} is no token: the tokenizer has {len(own):,}"))
                elif number not in control:
                    text = f"{what} is the token {token!r}, a part of texts: see tokenizer_path"
                    wrong.append(red("end-ids", text))
                shown[f"{key}={number}"] = str(token)
    if wrong or shown:
        text = ", ".join(f"{key} is {token}" for key, token in shown.items())
        yield from wrong or [green("end-ids", f"ids in the files of the model are control tokens: {text}")]


def _generation(path: str) -> dict[str, Any]:
    if (folder := _folder_of(path)) is None:
        return {}
    try:
        return json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


CHECKS = (model_tokenizer, end_ids)
