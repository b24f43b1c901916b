"""The same work done by the transformers library, as one would write it: generate, forward, AdamW, all with sdpa.

Rollout: `generate` with its own KV cache, prompts repeated for every sample and padded on the left; log-probabilities
are taken from the scores that its sampling sees. Training: micro-batches of whole rows, logits of the trained part, a
policy-gradient loss on the gathered log-softmax, torch's fused AdamW on weights of the same type. Where memory runs out
the pieces are halved: all work is done, in smaller parts, so that tokens per second stay comparable.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from areno.bench.arguments import Settings
from areno.bench.device import synchronize
from areno.bench.timing import measure, tell
from areno.bench.work import Work, row
from areno.errors import EngineError
from areno.types import TrainSequence

T = TypeVar("T")
_MOST_TOKENS = 8192  # of a micro-batch, at the start: its logits in float32 take 5 GB with a vocabulary of 150,000
_WARM_UP_TOKENS = 8


class WithTransformers:
    """A contender."""

    name = "transformers"

    def __init__(self, settings: Settings, folder: str, random_init: bool):
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        started = time.perf_counter()
        self._settings = settings
        self.device, dtype = settings.device, getattr(torch, settings.dtype)
        model: Any
        if random_init:
            config = AutoConfig.from_pretrained(folder)
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(self.device)
        self.model.generation_config = GenerationConfig(pad_token_id=0)  # no token ends a completion
        self.vocab_size: int = model.config.vocab_size
        self._optimizer: torch.optim.Optimizer | None = None
        if settings.trains:
            if settings.recompute:
                name = "activation_checkpointing_enable"  # as later versions call it
                enable = getattr(model, name, None) or model.gradient_checkpointing_enable
                enable({"use_reentrant": False})
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)
        self.prompts_at_once = len(settings.work.prompt_lens)
        self.rows_at_once = max(1, min(settings.tokens_per_mb, _MOST_TOKENS) // max(settings.work.row_lens))
        synchronize(self.device)
        self.start_s = time.perf_counter() - started

    def rollout(self, work: Work, prompts: list[list[int]]) -> list[TrainSequence]:
        """Prompts are sampled together, as many as there is memory for."""
        self.model.eval()
        rows: list[TrainSequence] = []
        while len(rows) < len(prompts) * work.n_samples:
            start = len(rows) // work.n_samples
            piece = slice(start, start + self.prompts_at_once)
            generated = self._in_memory(
                lambda piece=piece: self._generate(prompts[piece], max(work.new_lens[piece]), work.n_samples),
                divisible=self.prompts_at_once > 1,
            )
            if generated is None:
                self.prompts_at_once = max(1, self.prompts_at_once // 2)
                continue
            tokens, logprobs = generated
            for index in range(len(tokens)):
                prompt, new_len = start + index // work.n_samples, work.new_lens[start + index // work.n_samples]
                new = slice(0, new_len)
                rows.append(row(prompts[prompt], tokens[index][new], logprobs[index][new], index % work.n_samples))
        return rows

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], n_new: int, n_samples: int) -> tuple[list[Any], list[Any]]:
        """New tokens and their log-probabilities, (prompts * samples, n_new) each."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
        lens = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        mask = (torch.arange(width, device=self.device) >= width - lens[:, None]).long()
        seen = _DrawnLogprobs()
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=n_new,
            num_return_sequences=n_samples,
            logits_processor=[seen],
        )
        return out[:, width:].tolist(), seen.finish(out).tolist()

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        """One optimizer step."""
        self.model.train()
        assert self._optimizer is not None
        while True:
            self._optimizer.zero_grad(set_to_none=True)
            if self._in_memory(lambda: self._backward(rows), divisible=self.rows_at_once > 1) is not None:
                break
            self._fewer_rows()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        synchronize(self.device)
        return {}

    def _backward(self, rows: Sequence[TrainSequence]) -> bool:
        n_trained = sum(list(item.prompt_mask or []).count(False) for item in rows)
        for start in range(0, len(rows), self.rows_at_once):
            piece = rows[start : start + self.rows_at_once]
            logprobs_RT = self._row_logprobs(piece)
            width = max(len(item.tokens or []) for item in piece)
            weights = [(item.advantages or []) + [0.0] * (width - len(item.tokens or [])) for item in piece]
            weights_RT = torch.tensor(weights, device=self.device)[:, -logprobs_RT.shape[1] :]
            (-(weights_RT * logprobs_RT).sum() / n_trained).backward()
        synchronize(self.device)
        return True

    def logprobs(self, rows: Sequence[TrainSequence]) -> list[list[float]]:
        """Of the responses, padded at the end to the longest row of a piece."""
        self.model.eval()
        out: list[list[float]] = []
        while len(out) < len(rows):
            piece = rows[len(out) : len(out) + self.rows_at_once]
            with torch.no_grad():
                scored = self._in_memory(
                    lambda piece=piece: self._row_logprobs(piece, all_tokens=True).tolist(),
                    divisible=self.rows_at_once > 1,
                )
            if scored is None:
                self._fewer_rows()
            else:
                out += scored
        return out

    def _row_logprobs(self, rows: Sequence[TrainSequence], all_tokens: bool = False) -> Tensor:
        """(R, t) log-probabilities of the last t tokens of the padded rows: the trained ones, or all but the first."""
        lens = [len(item.tokens or []) for item in rows]
        width = max(lens)
        ids = torch.tensor([[*(item.tokens or []), *[0] * (width - len(item.tokens or []))] for item in rows])
        ids = ids.to(self.device)
        mask = None
        if min(lens) < width:
            mask = (torch.arange(width) < torch.tensor(lens)[:, None]).long().to(self.device)
        prompt_len = 1 if all_tokens else min(list(item.prompt_mask or []).count(True) for item in rows)
        keep = width - prompt_len + 1  # the logits of token t are at t - 1
        logits = self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits[:, :-1]
        targets = ids[:, prompt_len:, None]
        return torch.log_softmax(logits.float(), dim=-1).gather(-1, targets)[..., 0]

    def _fewer_rows(self) -> None:
        self.rows_at_once = max(1, self.rows_at_once // 2)

    def _in_memory(self, body: Callable[[], T], *, divisible: bool) -> T | None:
        """None where memory ran out and a smaller piece may help."""
        try:
            return body()
        except torch.OutOfMemoryError as error:
            if not divisible:
                raise EngineError(f"transformers ran out of device memory with a single row: {error}") from error
        gc.collect()
        torch.cuda.empty_cache()
        return None


class _DrawnLogprobs:
    """A logits processor that changes nothing: it keeps the log-probability of what was drawn one step before."""

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._drawn: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        self._before = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def finish(self, ids: Tensor) -> Tensor:
        """(R, n_new), once all is drawn."""
        self._take(ids)
        return torch.stack(self._drawn, dim=1)

    def _take(self, ids: Tensor) -> None:
        if self._before is not None:
            self._drawn.append(self._before.gather(-1, ids[:, -1:])[:, 0])


def run_transformers(settings: Settings, folder: str, random_init: bool) -> dict[str, Any]:
    """All figures of transformers for these settings."""
    tell(f"transformers: starting {settings.shape} on {settings.device}")
    cuda = settings.device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(settings.device)
    other = WithTransformers(settings, folder, random_init)
    warm_up = settings.work.with_new_at_most(_WARM_UP_TOKENS) if settings.rolls_out else None
    timed = measure(other, settings.kind, settings.work, settings.against_repeats, warm_up)
    figures: dict[str, Any] = {"start_s": other.start_s, **timed.figures(settings.work), "repeats_s": timed.seconds}
    if cuda:
        figures["peak_memory_gib"] = torch.cuda.max_memory_allocated(settings.device) / 2**30
    if settings.rolls_out:
        figures["prompts_at_once"] = other.prompts_at_once
        figures["parts"] = math.ceil(len(settings.work.prompt_lens) / other.prompts_at_once)
    if not settings.rolls_out or settings.trains:
        figures["rows_at_once"] = other.rows_at_once
    return figures
