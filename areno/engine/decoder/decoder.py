"""The decoder: requests in, sampled completions out, one scheduling step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from areno.engine.decoder.blocks import BlockManager
from areno.engine.decoder.runner import Drawn, Runner
from areno.engine.decoder.scheduler import Scheduler
from areno.engine.decoder.sequence import Sequence
from areno.engine.limits import RequestLimits
from areno.engine.spec import RolloutStats
from areno.engine.types import GenerationOutput, GenerationRequest
from areno.errors import EngineError
from areno.kernels.sampling import sample_key
from areno.models.transformer import Transformer


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
        self.limits = RequestLimits(
            vocab_size=model.config.vocab_size,
            context_len=model.config.max_position_embeddings,
            kv_tokens=n_blocks * block_size,
            stop_strings=detokenize is not None,
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
    def stats(self) -> RolloutStats:
        """Counters since the decoder was made."""
        graphs = self._runner.graphs
        return RolloutStats(
            running=self._scheduler.n_running,
            waiting=len(self._scheduler.waiting),
            generated_tokens=self._n_generated,
            preemptions=self._scheduler.n_preemptions,
            cached_prompt_tokens=self._scheduler.n_cached_tokens,
            graph_replays=0 if graphs is None else graphs.n_replays,
        )

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it joins the batch at one of the next steps. EngineError where it cannot be served."""
        max_new = self.limits.max_new(request)
        if request.request_id in self._unfinished:
            raise EngineError(f"request id {request.request_id} is that of an unfinished request; give each its own")
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

    def clear(self) -> None:
        """Drop all requests; nothing more comes of them."""
        for request_id in list(self._unfinished):
            self.abort(request_id)
        self._outputs = []

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
