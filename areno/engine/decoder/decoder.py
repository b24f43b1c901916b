"""The decoder: requests in, sampled completions out, one scheduling step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from areno.engine.decoder.blocks import BlockManager
from areno.engine.decoder.runner import Drawn, Runner
from areno.engine.decoder.scheduler import Scheduler
from areno.engine.decoder.sequence import Sequence
from areno.engine.types import GenerationOutput, GenerationRequest
from areno.errors import EngineError
from areno.kernels.sampling import sample_key
from areno.models.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStats:
    """For logs. The totals count from the start of the decoder."""

    running: int
    waiting: int
    generated_tokens: int
    preemptions: int
    cached_prompt_tokens: int  # tokens that needed no prefill, since their blocks were found
    graph_replays: int


class Decoder:
    """Continuous batching over a paged KV cache; uses the model's weights in place.

    The scheduler works one step behind the device: a step is started first, then the tokens of the one before are
    looked at. So a sequence that a stop token ends may run one more step, whose token is dropped. On a CPU the same
    happens, without the overlap. Results depend on requests only, not on what else runs: see GenerationRequest.

    n_blocks, block_size: room of the cache, in blocks and in tokens of a block. max_running: sequences decoded at once.
    max_prefill_tokens: prompt tokens of one step. detokenize: completion tokens to text, needed for stop strings.
    use_graphs: replay the decode step as a CUDA graph. attn_backend: of the prefill, as `choose_backend` returns it.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        n_blocks: int,
        block_size: int,
        max_running: int,
        max_prefill_tokens: int,
        eos_token_ids: Collection[int],
        use_graphs: bool = False,
        attn_backend: str = "sdpa",
        detokenize: Callable[[list[int]], str] | None = None,
    ):
        self._config = model.config
        self._eos = frozenset(eos_token_ids)
        self._detokenize = detokenize
        self._blocks = BlockManager(n_blocks, block_size)
        self._scheduler = Scheduler(self._blocks, max_running, max_prefill_tokens)
        self._runner = Runner(
            model,
            n_blocks=n_blocks,
            block_size=block_size,
            max_running=max_running,
            max_blocks=min(n_blocks, self._blocks.blocks_for(model.config.max_position_embeddings)),
            use_graphs=use_graphs,
            attn_backend=attn_backend,
        )
        self._in_flight: list[Drawn] = []
        self._outputs: list[GenerationOutput] = []
        self._unfinished: dict[int, int] = {}  # request id -> samples
        self._n_generated = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return self._scheduler.has_work or bool(self._outputs)

    @property
    def stats(self) -> DecoderStats:
        graphs = self._runner.graphs
        return DecoderStats(
            running=self._scheduler.n_running,
            waiting=len(self._scheduler.waiting),
            generated_tokens=self._n_generated,
            preemptions=self._scheduler.n_preemptions,
            cached_prompt_tokens=self._scheduler.n_cached_tokens,
            graph_replays=0 if graphs is None else graphs.n_replays,
        )

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it joins the batch at one of the next steps. EngineError where it cannot be served."""
        max_new = self._check(request)
        params = request.params
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos)
        self._unfinished[request.request_id] = request.n_samples
        for sample in range(request.n_samples):
            self._scheduler.add(
                Sequence(
                    request=request,
                    sample=sample,
                    key=sample_key(request.seed, sample),
                    max_new=max_new,
                    stop_ids=stop_ids,
                    tokens=list(request.prompt),
                )
            )

    def abort(self, request_id: int) -> None:
        """End a request's unfinished samples; the next step returns them as they are, with reason "abort"."""
        self._finish(self._scheduler.abort(request_id))

    def step(self) -> list[GenerationOutput]:
        """Start one step on the device, look at the tokens of the one before, return the samples that finished."""
        if self._scheduler.is_short_of_blocks():
            self._collect()
        drawn = self._runner.launch(self._scheduler.schedule())
        self._collect()
        self._in_flight = drawn
        outputs, self._outputs = self._outputs, []
        return outputs

    def reset_cache(self) -> None:
        """Forget all keys and values, since the weights have changed. Unfinished sequences are computed anew."""
        self._collect()
        self._scheduler.preempt_all()
        self._blocks.forget()

    def _collect(self) -> None:
        """Wait for the tokens in flight and hand them to their sequences."""
        in_flight, self._in_flight = self._in_flight, []
        finished: list[Sequence] = []
        for drawn in in_flight:
            for sequence, token, logprob in zip(drawn.sequences, *drawn.wait(), strict=True):
                if sequence.finish_reason is not None:  # stopped, or aborted, with this one on its way
                    continue
                if math.isnan(logprob):
                    raise EngineError(
                        "the model produced non-finite logits; expected finite weights: a training step may have "
                        "diverged (lower actor.optimizer.lr) or the checkpoint at actor.path is damaged"
                    )
                self._n_generated += 1
                if sequence.accept(token, logprob, self._detokenize):
                    finished.append(sequence)
                # The last token is an input of the next step, so its own keys and values are not in the cache yet.
                self._scheduler.register(sequence, len(sequence.tokens) - 1)
        if finished:
            self._scheduler.remove_finished()
            self._finish(finished)

    def _finish(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._outputs.append(sequence.output())
            request_id = sequence.request.request_id
            self._unfinished[request_id] -= 1
            if not self._unfinished[request_id]:
                del self._unfinished[request_id]

    def _check(self, request: GenerationRequest) -> int:
        """The most tokens each sample may get; EngineError where the request is not one that can be served."""
        params, n_prompt = request.params, len(request.prompt)
        context = self._config.max_position_embeddings
        if params.max_context_len is not None:
            context = min(context, params.max_context_len)
        max_new = min(params.max_new_tokens, context - n_prompt)
        n_needed = self._blocks.blocks_for(n_prompt + max_new - 1)  # the last token is never an input
        if request.request_id in self._unfinished:
            problem = f"request id {request.request_id} is that of an unfinished request; give each its own"
        elif request.n_samples < 1:
            problem = f"n_samples is {request.n_samples}; at least 1 is needed (gconfig.n_samples)"
        elif n_prompt == 0:
            problem = "the prompt has no tokens; at least one is needed"
        elif min(request.prompt) < 0 or max(request.prompt) >= self._config.vocab_size:
            problem = (
                f"the prompt has token ids {min(request.prompt)}..{max(request.prompt)}, the model's vocabulary is "
                f"0..{self._config.vocab_size - 1}; check tokenizer_path"
            )
        elif params.max_prompt_len is not None and n_prompt > params.max_prompt_len:
            problem = f"the prompt has {n_prompt} tokens, more than max_prompt_len={params.max_prompt_len}"
        elif params.max_new_tokens < 1:
            problem = f"max_new_tokens is {params.max_new_tokens}; at least 1 is needed (gconfig.max_new_tokens)"
        elif max_new < 1:
            problem = (
                f"the prompt has {n_prompt} tokens, which leaves no room for a completion in a context of {context}; "
                "shorten the prompt or raise gconfig.max_tokens (the model's own limit is "
                f"{self._config.max_position_embeddings})"
            )
        elif n_needed > self._blocks.n_blocks:
            room = self._blocks.n_blocks * self._blocks.block_size
            problem = (
                f"a prompt of {n_prompt} tokens with up to {max_new} new ones does not fit the KV cache of {room} "
                "tokens even alone; raise rollout.max_kv_tokens (or rollout.mem_fraction), or lower "
                "gconfig.max_tokens or gconfig.max_new_tokens"
            )
        elif not 0 <= params.temperature < math.inf:
            problem = f"temperature is {params.temperature}; a number of at least 0 is needed (gconfig.temperature)"
        elif not 0 < params.top_p <= 1:
            problem = f"top_p is {params.top_p}; it must be above 0 and at most 1 (gconfig.top_p)"
        elif params.top_k == 0 or params.top_k < -1:
            problem = f"top_k is {params.top_k}; use -1 for all tokens or a positive number (gconfig.top_k)"
        elif params.stop and self._detokenize is None:
            problem = "stop strings need a tokenizer, and there is none; use stop_token_ids"
        else:
            return max_new
        raise EngineError(f"request {request.request_id} cannot be served: {problem}")
