"""Run the benchmark's work with other libraries, for comparison.

`TransformersContender` does rollout and training in the way a user of transformers would write them, with
sdpa attention:

- Rollout: `generate` with its KV cache. Prompts are repeated for every sample and padded on the left. The
  log-probabilities come from the scores from which `generate` samples.
- Training: micro-batches of whole rows. Logits are computed only for the tokens after the shortest prompt of a
  micro-batch. The loss is a policy gradient on the gathered log-softmax, and the optimizer is torch's fused AdamW on
  weights of the same dtype.

If memory runs out, the number of prompts or rows computed at once is halved. All work is still done, so tokens per
second stay comparable.

`VllmContender` does the rollout with vLLM and returns the log-probability of every sampled token.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from areno.bench.arguments import Settings
from areno.bench.device import synchronize
from areno.bench.work import Workload, synthetic_row
from areno.errors import EngineError
from areno.models.registry import load_config
from areno.trainers.rows import n_trained, prompt_masks, token_rows
from areno.types import TrainSequence

T = TypeVar("T")
_MAX_TOKENS = 8192  # of the first micro-batch: its logits in float32 take 5 GB with a vocabulary of 150,000
_WARM_UP_TOKENS = 8


class TransformersContender:
    """The transformers library as one of the compared libraries.

    `prompts_at_once` and `rows_at_once` are halved when memory runs out.
    """

    name = "transformers"

    def __init__(self, settings: Settings, folder: str, random_init: bool):
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        self._settings, self.device = settings, settings.device
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        how: dict[str, Any] = {"dtype": getattr(torch, settings.dtype), "attn_implementation": "sdpa"}
        model: Any
        if random_init:
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **how)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, **how)
        self.model = model.to(self.device)
        self.model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)  # no token ends one
        self.vocab_size: int = model.config.vocab_size
        self._optimizer: torch.optim.Optimizer | None = None
        if settings.trains:
            if settings.recompute:
                name = "activation_checkpointing_enable"  # its name in later versions
                enable = getattr(model, name, None) or model.gradient_checkpointing_enable
                enable({"use_reentrant": False})
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)
        self.warm_up = settings.work.with_max_new_tokens(_WARM_UP_TOKENS) if settings.rolls_out else None
        self.prompts_at_once = len(settings.work.prompt_lens)
        self.rows_at_once = max(1, min(settings.tokens_per_mb, _MAX_TOKENS) // max(settings.work.row_lens))
        synchronize(self.device)
        self.start_s = time.perf_counter() - started

    def figures(self) -> dict[str, float]:
        """Return the peak memory, how many prompts or rows were computed at once, and the number of such `parts`."""
        settings, out = self._settings, {}
        if self.device.startswith("cuda"):
            out["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        if settings.rolls_out:
            out["prompts_at_once"] = self.prompts_at_once
            out["parts"] = math.ceil(len(settings.work.prompt_lens) / self.prompts_at_once)
        if settings.trains:
            out["rows_at_once"] = self.rows_at_once
        return out

    def rollout(self, work: Workload, prompts: list[list[int]]) -> list[TrainSequence]:
        self.model.eval()
        rows: list[TrainSequence] = []
        while len(rows) < len(prompts) * work.n_samples:
            start = len(rows) // work.n_samples
            piece = slice(start, start + self.prompts_at_once)
            generated = _try_in_memory(
                self.prompts_at_once, self._generate, prompts[piece], max(work.new_lens[piece]), work.n_samples
            )
            if generated is None:
                self.prompts_at_once //= 2
                continue
            for index, (tokens, logprobs) in enumerate(zip(*generated, strict=True)):
                number, sample = start + index // work.n_samples, index % work.n_samples
                new = slice(0, work.new_lens[number])
                rows.append(synthetic_row(prompts[number], tokens[new], logprobs[new], sample))
        return rows

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], n_new: int, n_samples: int) -> tuple[list[Any], list[Any]]:
        """Return token ids and log-probabilities of the completions, [prompts * n_samples, n_new] each."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
        lens = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        mask = (torch.arange(width, device=self.device) >= width - lens[:, None]).long()
        seen = _SampledLogprobs()
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=n_new,
            num_return_sequences=n_samples,
            logits_processor=[seen],
        )
        return out[:, width:].tolist(), seen.finish_logprobs(out).tolist()

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        assert self._optimizer is not None
        self.model.train()
        while _try_in_memory(self.rows_at_once, self._backward, rows) is None:
            self.rows_at_once //= 2
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        synchronize(self.device)
        return {}

    def _backward(self, rows: Sequence[TrainSequence]) -> bool:
        """Compute the gradients of the loss over all rows.

        Returns True, because `_try_in_memory` returns None if memory ran out.
        """
        self.model.zero_grad(set_to_none=True)
        n_tokens = sum(map(n_trained, rows))
        for start in range(0, len(rows), self.rows_at_once):
            piece = rows[start : start + self.rows_at_once]
            logprobs_RT = self._row_logprobs(piece)
            weights_RL = _padded([item.advantages for item in piece]).float().to(self.device)
            (-(weights_RL[:, -logprobs_RT.shape[1] :] * logprobs_RT).sum() / n_tokens).backward()
        synchronize(self.device)
        return True

    def _row_logprobs(self, rows: Sequence[TrainSequence]) -> Tensor:
        """Return the log-probabilities of the tokens after the shortest prompt in each padded row, [R, t]."""
        tokens = token_rows(rows)
        ids = _padded(tokens).to(self.device)
        lens, width = torch.tensor(list(map(len, tokens))), ids.shape[1]
        mask = None
        if lens.min() < width:
            mask = (torch.arange(width) < lens[:, None]).long().to(self.device)
        prompt_len = int(min(map(np.count_nonzero, prompt_masks(rows))))
        keep = width - prompt_len + 1  # the logits of token t are at position t - 1
        logits = self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits[:, :-1]
        targets = ids[:, prompt_len:, None]
        return torch.log_softmax(logits.float(), dim=-1).gather(-1, targets)[..., 0]


def _padded(rows: Sequence[Any]) -> Tensor:
    """Return rows as a tensor [R, L], padded with zeros at the end."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _try_in_memory(at_once: int, body: Callable[..., T], *args: Any) -> T | None:
    """Return the result of `body`. If memory ran out, free the cache and return None, or raise if `at_once` is 1."""
    try:
        return body(*args)
    except torch.OutOfMemoryError as error:
        if at_once == 1:
            raise EngineError(f"transformers ran out of device memory with a single row: {error}") from error
    gc.collect()
    torch.cuda.empty_cache()
    return None


class _SampledLogprobs:
    """Logits processor for `generate` that changes nothing, and records the log-probability of each sampled token.

    A token's log-probability is recorded in the step after its sampling, when the token is known: the last of
    `input_ids`, [R, T]. So the log-softmax of `scores`, [R, V], is kept for the next call, and `finish_logprobs` is
    called after the last step.
    """

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._drawn: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._record(input_ids)
        self._before = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def finish_logprobs(self, ids: Tensor) -> Tensor:
        self._record(ids)
        return torch.stack(self._drawn, dim=1)

    def _record(self, ids: Tensor) -> None:
        if self._before is not None:
            self._drawn.append(self._before.gather(-1, ids[:, -1:])[:, 0])


class VllmContender:
    """vLLM as one of the compared libraries, for rollout only."""

    name = "vllm"
    warm_up = None  # warms up with the work itself

    def __init__(self, settings: Settings, folder: str, random_init: bool):
        from vllm import LLM  # type: ignore[import-not-found]

        started = time.perf_counter()
        self._llm: Any = LLM(
            model=folder,
            load_format="dummy" if random_init else "auto",
            dtype=settings.dtype,
            skip_tokenizer_init=True,
            max_model_len=max(settings.work.row_lens),
            max_num_seqs=settings.work.n_rows,
            seed=0,
        )
        self.vocab_size = load_config(folder).vocab_size
        self.start_s = time.perf_counter() - started

    def figures(self) -> dict[str, float]:
        return {}

    def rollout(self, work: Workload, prompts: list[list[int]]) -> list[TrainSequence]:
        from vllm import SamplingParams  # type: ignore[import-not-found]

        params = [
            SamplingParams(n=work.n_samples, max_tokens=new_len, ignore_eos=True, logprobs=0, detokenize=False)
            for new_len in work.new_lens
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        rows = []
        for prompt, output in zip(prompts, self._llm.generate(requests, params, use_tqdm=False), strict=True):
            for sample, drawn in enumerate(output.outputs):
                tokens = list(drawn.token_ids)
                logprobs = [step[token].logprob for step, token in zip(drawn.logprobs, tokens, strict=True)]
                rows.append(synthetic_row(prompt, tokens, logprobs, sample))
        return rows
