"""The size of the flight recorder's records, as measured on steps of a 0.6B model and of the quickstarts."""

from __future__ import annotations

from areno.config.experiments import ExperimentConfig, ReferencedExperimentConfig
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.models.config import TransformerConfig
from areno.plan.phases import SequenceLengths

_STEP = 10_000  # settings, metrics and digests
_SAMPLE = 20  # reward, place in the data
_TOKEN, _TEXT = 3, 1.5  # of a token id, and of the text of a token, compressed
_FLOAT32, _FLOAT64 = 4, 5  # of a value of a token, compressed; a float64 has the digits of a float32


def record_bytes(config: ExperimentConfig, model: TransformerConfig, lengths: SequenceLengths, n_rows: int) -> int:
    """Return the bytes of the record of a step that trains on `n_rows` rows. 0 if the recorder is off.

    `model` is the actor's.
    """
    if not config.recorder.max_gib:
        return 0
    if not isinstance(config, PolicyExperimentConfig):
        n_scores = 1 if isinstance(config, ReferencedExperimentConfig) and config.needs_reference() else 0
        return int(_STEP + n_rows * (lengths.prompt + lengths.answer) * (_FLOAT32 + n_scores * _FLOAT32))
    n_scores = (config.ref is not None) + (config.teacher is not None)
    n_scores += 2 * isinstance(config, CriticExperimentConfig)  # values and returns
    sampled = config.rows_per_step * (_SAMPLE + lengths.answer * (_TOKEN + _TEXT + _FLOAT64))
    prompts = config.train_dataset.batch_size * lengths.prompt * _TOKEN
    trained = n_rows * lengths.answer * (_FLOAT32 + n_scores * _FLOAT64)
    listed = config.actor.n_recorded_tokens and config.actor.n_recorded_tokens + 1
    sampled += config.rows_per_step * lengths.answer * listed * (_TOKEN + _FLOAT32)
    experts = 0
    if model.experts is not None and config.actor.routing_replay:
        of_token = len(model.experts.layers(model.num_layers)) * model.experts.top_k * model.experts.id_bytes
        experts = config.rows_per_step * (lengths.prompt + lengths.answer) * of_token
    return int(_STEP + sampled + prompts + trained + experts)
