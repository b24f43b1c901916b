"""The same rollout done by vLLM, where that is installed, with the log-probability of every sampled token returned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from areno.bench.arguments import Settings
from areno.bench.work import Work, row
from areno.errors import EngineError
from areno.models.registry import load_config
from areno.types import TrainSequence


class WithVllm:
    """A contender for rollout only."""

    name = "vllm"
    warm_up = None  # the work itself

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
        """Nothing beside the times."""
        return {}

    def rollout(self, work: Work, prompts: list[list[int]]) -> list[TrainSequence]:
        """One call of generate."""
        from vllm import SamplingParams  # type: ignore[import-not-found]

        params = [
            SamplingParams(
                n=work.n_samples, temperature=1.0, max_tokens=new_len, ignore_eos=True, logprobs=0, detokenize=False
            )
            for new_len in work.new_lens
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        rows = []
        for prompt, output in zip(prompts, self._llm.generate(requests, params, use_tqdm=False), strict=True):
            for sample, drawn in enumerate(output.outputs):
                tokens = list(drawn.token_ids)
                logprobs = [step[token].logprob for step, token in zip(drawn.logprobs, tokens, strict=True)]
                rows.append(row(prompt, tokens, logprobs, sample))
        return rows

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        """Not a thing it does."""
        raise EngineError("vllm does not train; compare it in a rollout")

    def logprobs(self, rows: Sequence[TrainSequence]) -> list[list[float]]:
        """Not a thing it is compared in."""
        raise EngineError("vllm is compared in a rollout only")
