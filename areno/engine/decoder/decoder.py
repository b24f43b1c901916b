"""The decoder: takes requests and returns sampled completions, one decoding step at a time."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, replace

import numpy as np

from areno.cost.kv_layout import KVLayout
from areno.engine.decoder.block_manager import BlockManager
from areno.engine.decoder.draft_verification import Drafts, TableDrafts, find_accepted_tokens, n_accepted_tokens
from areno.engine.decoder.grammar import Vocabulary
from areno.engine.decoder.ngram_drafts import NgramDrafter
from areno.engine.decoder.runner import Runner
from areno.engine.decoder.sampler import PendingTokens
from areno.engine.decoder.scheduler import Scheduler
from areno.engine.decoder.sequence import Sequence, StopStrings
from areno.engine.decoder.slots import STAGED
from areno.engine.reports import RolloutStats
from areno.engine.requests import RequestLimits
from areno.errors import EngineError, non_finite_logits
from areno.kernels.backend import HostCopy
from areno.kernels.sampling import sample_keys
from areno.models.transformer import Transformer
from areno.specs.engine import EngineSpec
from areno.specs.rollout import RolloutSpec
from areno.types import RETURNED, GenerationOutput, GenerationRequest

MAX_STOP_STRINGS = 64  # sets of them that are remembered
STREAM_EVERY_S = 0.02  # a small model samples faster than a person reads, and each output takes host time
PIECE_STEPS = 64  # of all samples at once: a message to the driver costs the host about as much for one as for many


@dataclass(frozen=True, slots=True)
class _StreamingPolicy:
    streams_due: bool
    ends_piece: bool

    def should_report(self, sequence: Sequence) -> bool:
        request = sequence.request
        return (self.ends_piece and request.pieces) or (
            request.stream and (self.streams_due or sequence.n_streamed == 0)
        )


class Decoder:
    """Continuous batching over a paged KV cache. Uses the weights that training updates in place, without a copy.

    With `runs_ahead`, the device is one step ahead of the host: a step is launched before the tokens of the previous
    step are read. So a sequence that ends with a stop token may run one more step, whose token is dropped. A completion
    depends only on its request, not on other requests in the batch.

    `n_blocks` counts blocks that hold `block_size` tokens of all layers. The layout of the KV cache is chosen for
    sequences of `rollout.max_len` tokens.

    `weights_version` is set by the caller between steps. Each token is returned with the version at the launch of the
    step that sampled it. `unfinished` maps a request id to the number of its samples that have not finished.
    """

    def __init__(
        self,
        model: Transformer,
        vocabulary: Vocabulary,
        spec: EngineSpec,
        rollout: RolloutSpec,
        *,
        n_blocks: int,
        block_size: int,
        attn_backend: str,
        runs_ahead: bool,
    ):
        self._vocabulary, self._eos = vocabulary, frozenset(vocabulary.eos_token_ids)
        # Kept, because the results for tokens serve later requests.
        self._stop_strings = functools.lru_cache(MAX_STOP_STRINGS)(StopStrings)
        config = model.config
        # Routes are kept in the blocks of the first group, and a sample's are read when it ends.
        context_len, by_window = config.max_position_embeddings, not spec.records_routes(rollout.role)
        layout = KVLayout.from_config(config, block_size, rollout.max_len, by_window=by_window)
        self.blocks = BlockManager(layout.pool_blocks(n_blocks), block_size, layout.groups)
        max_running, max_prefill_tokens = (
            spec.layout.samples_per_replica(rollout.n_slots),
            rollout.decoder.max_prefill_tokens,
        )
        self._scheduler = Scheduler(self.blocks, max_running, max_prefill_tokens, reuses_prefixes=config.delta is None)
        self.runner = Runner(model, self.blocks, layout, spec, rollout, attn_backend, vocabulary.ids_with_text)
        self.limits = RequestLimits(
            vocab_size=model.config.vocab_size,
            context_len=context_len,
            kv_tokens=layout.max_sequence_tokens(self.blocks.n_blocks, context_len),
            cache_tokens=n_blocks * block_size,
        )
        self.weights_version, self._runs_ahead = 0, runs_ahead
        self.drafter: NgramDrafter | None = None
        self._n_generated = self._n_drafted = self._n_accepted = self._n_decode_steps = self._n_draft_steps = 0
        self._in_flight: list[PendingTokens] = []
        self._in_flight_version = 0
        self._outputs: list[GenerationOutput] = []
        self._awaiting: list[tuple[GenerationOutput, HostCopy]] = []  # finished, until their routes have arrived
        self.unfinished: dict[int, int] = {}
        self._finite_version: int | None = None  # of weights that were looked through
        self._has_bad_blocks = False  # the cache may hold numbers that are not finite
        self.stream_every_s, self._streamed_at, self._n_collected = STREAM_EVERY_S, 0.0, 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._outputs) or bool(self._awaiting)

    @property
    def stats(self) -> RolloutStats:
        """Numbers of running and waiting samples now, and counts of tokens and events since the last `reset_stats`."""
        return RolloutStats(
            running=self._scheduler.n_running,
            waiting=len(self._scheduler.waiting),
            generated_tokens=self._n_generated,
            preemptions=self._scheduler.n_preemptions,
            cached_prompt_tokens=self._scheduler.n_cached_tokens,
            graph_replays=sum(graphs.n_replays for graphs in self.runner.all_graphs),
            drafted_tokens=self._n_drafted,
            accepted_tokens=self._n_accepted,
            decode_steps=self._n_decode_steps,
            draft_steps=self._n_draft_steps,
        )

    def use_drafter(self, drafter: NgramDrafter | None) -> None:
        """Set the drafter that proposes next tokens. Models with recurrent states do not use one."""
        self.drafter = drafter if self.runner.model.config.delta is None else None
        if self.drafter is not None:
            self.runner.ngrams.use_table(self.drafter.table)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError if it cannot be served, GrammarError if its grammar is invalid."""
        max_new = self.limits.max_new(request)
        if request.request_id in self.unfinished:
            raise EngineError(f"request id {request.request_id} is that of an unfinished request; give each its own")
        params = request.params
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos)
        stop_strings: StopStrings | None = None
        if params.stop:
            stop_strings = self._stop_strings(tuple(params.stop), self._vocabulary.tokenizer.decode)
        grammar = None if request.grammar is None else self._vocabulary.grammars.compile(request.grammar)
        self.unfinished[request.request_id] = request.n_samples
        samples = range(request.first_sample, request.first_sample + request.n_samples)
        for sample, key in zip(samples, sample_keys(request.seed, samples), strict=True):
            sequence = Sequence(
                request=request,
                sample=sample,
                key=key,
                max_new=max_new,
                stop_ids=stop_ids,
                tokens=list(request.prompt),
                stop_strings=stop_strings,
                grammar=None if grammar is None else grammar.start(),
            )
            if request.begun is not None:
                sequence.resume_from(request.begun)
            self._scheduler.waiting.append(sequence)

    def abort(self, request_id: int) -> None:
        """End the unfinished samples of a request. The next step returns them with finish_reason "abort"."""
        self._finish(self._scheduler.abort(request_id))

    def drop_waiting(self, n_samples: int) -> None:
        """Drop requests that have not started, the youngest first, until `n_samples` samples are dropped.

        Another replica can then serve them. For each dropped request, the next step returns one output whose `sample`
        is RETURNED (-1).
        """
        for request in self._scheduler.remove_waiting(n_samples):
            request_id = request.request_id
            del self.unfinished[request_id]
            self._outputs.append(
                GenerationOutput(
                    request_id=request_id, sample=RETURNED, tokens=[], logprobs=[], versions=[], finish_reason="abort"
                )
            )

    def park(self) -> list[GenerationOutput]:
        """Remove all samples. Return the outputs that `step` has not returned, then an output for each removed sample.

        Outputs of removed samples have no finish_reason. To continue such a sample, submit a request with `begun`.
        """
        self._collect_previous_step()
        self._scheduler.preempt_all()
        finished = self._outputs
        for output, routes in self._awaiting:
            output.routes = routes.result()
            finished.append(output)
        parked = [sequence.take_output(whole=True) for sequence in self._scheduler.waiting]
        self._scheduler.waiting.clear()
        self._outputs, self._awaiting, self.unfinished = [], [], {}
        return finished + parked

    def clear(self) -> None:
        for request_id in list(self.unfinished):
            self.abort(request_id)
        self._outputs, self._awaiting = [], []

    def step(self) -> list[GenerationOutput]:
        """Launch one step, then read the tokens of the previous step or, without `runs_ahead`, of this step.

        Returns an output with the whole completion for each finished sample, and outputs with new tokens for unfinished
        samples of requests that set `stream` or `pieces`.
        """
        awaiting, self._awaiting = self._awaiting, []
        if self._scheduler.is_short_of_blocks():
            self._collect_previous_step()
        drafts = self.drafter is not None and self.drafter.should_draft(self._scheduler.n_running)
        # The host knows the lengths of sequences after a verification when it has read their tokens. For another step
        # with TableDrafts, it suffices that the device knows them.
        if not (drafts and self._may_draft_ahead()) and (
            drafts or any(pending.drafts is not None for pending in self._in_flight)
        ):
            self._collect_previous_step()
        if self._has_bad_blocks:
            self.reset_cache()
        scheduled = self._scheduler.schedule(self._propose_drafts if drafts else None)
        if drafts and scheduled.drafts is None and self.drafter is not None:  # no draft is left
            self.drafter.count_verified([(sequence, 0) for sequence in scheduled.decode])
        self._n_decode_steps += bool(scheduled.decode)
        self._n_draft_steps += scheduled.drafts is not None
        launched = self.runner.launch(scheduled)
        if self.drafter is not None:
            self.drafter.prepare_table(scheduled.decode)
        self._collect_previous_step(scheduled.drafts if isinstance(scheduled.drafts, TableDrafts) else None)
        self._in_flight, self._in_flight_version = launched, self.weights_version
        if not self._runs_ahead:
            self._collect_previous_step()
        outputs, self._outputs = self._outputs, []
        for output, routes in awaiting:  # copied after a step that has ended by now
            output.routes = routes.result()
            outputs.append(output)
        return outputs

    def limit_running(self, most: int) -> None:
        """Set how many sequences may be in the batch from now on. Sequences in the batch stay."""
        self._scheduler.limit_running(most)

    def reset_cache(self) -> None:
        """Drop all keys and values, because the weights have changed. Unfinished sequences are recomputed."""
        self._collect_previous_step()
        self._scheduler.preempt_all()
        self.blocks.reset()
        if self._has_bad_blocks:
            self.runner.cache.clear()  # attention reads blocks of others with weight 0, and 0 * nan is nan
            self._has_bad_blocks = False

    def release_departed_blocks(self) -> None:
        self._scheduler.release_departed_blocks()

    @property
    def waiting_completion_lens(self) -> list[int]:
        """The number of completion tokens of each sample that was interrupted and waits to continue."""
        return [n_new for sequence in self._scheduler.waiting if (n_new := sequence.n_new)]

    def reset_stats(self) -> None:
        self._n_drafted = self._n_accepted = self._n_decode_steps = self._n_draft_steps = 0
        self._n_generated = self._scheduler.n_preemptions = self._scheduler.n_cached_tokens = 0
        for graphs in self.runner.all_graphs:
            graphs.n_replays = 0

    def _may_draft_ahead(self) -> bool:
        """Return whether the next step may draft before the tokens of the step in flight have arrived."""
        are_drafts = [isinstance(pending.drafts, TableDrafts) for pending in self._in_flight]
        return self._runs_ahead and are_drafts == [True] and self._scheduler.may_draft_ahead()

    def _collect_previous_step(self, ahead: TableDrafts | None = None) -> None:
        """Accept the tokens of the previous step. `ahead` are the drafts of the step that was launched after it."""
        in_flight, self._in_flight = self._in_flight, []
        finished: list[Sequence] = []
        now = time.monotonic()
        if streams_due := now - self._streamed_at >= self.stream_every_s:
            self._streamed_at = now
        self._n_collected += bool(in_flight)
        streams = _StreamingPolicy(streams_due, self._n_collected % PIECE_STEPS == 0)
        for pending in in_flight:
            if isinstance(pending.drafts, TableDrafts):
                finished += self._accept_table_drafts(pending, pending.drafts, streams, ahead)
            elif pending.drafts is not None:
                finished += self._accept_list_drafts(pending, pending.drafts, streams)
            else:
                finished += self._accept_step(pending, streams)
        if finished:
            cache = self.runner.routes
            if self.drafter is not None:
                self.drafter.learn_finished(finished)
            # While the blocks are theirs: what comes to the device later may write over them.
            routes = None
            if cache is not None:
                routes = [
                    cache.start_read(each.block_tables.group_blocks[0], each.n_prompt + each.n_new - 1)
                    for each in finished
                ]
            self._scheduler.remove_finished()
            self._finish(finished, routes)

    def _accept_step(self, pending: PendingTokens, streams: _StreamingPolicy) -> list[Sequence]:
        """Accept one token per sequence, and return the sequences that end. Most tokens go to the slot table only."""
        table, slots_B = self._scheduler.table, pending.slots_B
        tokens_B, logprobs_B = pending.wait_for_tokens()
        # A sequence that stopped or was aborted with this token in flight has left its slot.
        is_wanted_B = table.owner[slots_B] == pending.owners_B
        by_host_B = is_wanted_B & (table.needs_host[slots_B] | ~np.isfinite(logprobs_B))
        plain = np.flatnonzero(is_wanted_B & ~by_host_B)
        plain_slots = slots_B[plain]
        table.stage(plain_slots, tokens_B[plain], logprobs_B[plain], self._in_flight_version)
        self._n_generated += len(plain)
        touched = self._find_affected(pending, plain, table.has_stopped(plain_slots, tokens_B[plain]), streams)
        by_host = np.flatnonzero(by_host_B).tolist()
        top, raw = (pending.wait_for_top_scores(), pending.wait_for_raw_logprobs()) if by_host else ([], [])
        for row in by_host:
            touched[row] = sequence = pending.sequences[row]
            if not math.isfinite(logprobs_B[row]):
                self._fail_sample(sequence)
            else:
                self._n_generated += 1
                sequence.accept(int(tokens_B[row]), float(logprobs_B[row]), self._in_flight_version, top[row], raw[row])
        return self._collect_finished(touched, streams)

    def _find_affected(
        self, pending: PendingTokens, plain: np.ndarray, stops: np.ndarray, streams: _StreamingPolicy
    ) -> dict[int, Sequence]:
        """Return, by batch row, the sequences that end, report tokens, or fill a KV block or their slot table row.

        `plain` are the batch rows whose new tokens are in the slot table. `stops` says for each of these rows whether
        its newest token is a stop token. Sets the `finish_reason` of the sequences that end.
        """
        table, slots = self._scheduler.table, pending.slots_B[plain]
        n_new = table.n_new[slots]
        is_last = n_new >= table.max_new[slots]
        # The last token is an input of the next step, so its own keys and values are not in the cache yet.
        fills_block = table.n_prompt[slots] + n_new - 1 >= table.register_at[slots]
        needed = stops | is_last | fills_block | (table.n_staged[slots] == STAGED)
        if streams.ends_piece:
            needed |= table.in_pieces[slots]
        touched = {row: pending.sequences[row] for row in plain[needed].tolist()}
        ends = zip(touched.values(), stops[needed].tolist(), is_last[needed].tolist(), strict=True)
        for sequence, has_stopped, is_at_limit in ends:
            sequence.finish_reason = "stop" if has_stopped else "length" if is_at_limit else None
        self._store_completions([each for each in touched.values() if each.finish_reason is not None])
        for sequence in touched.values():
            if sequence.completion is None:
                sequence.append_staged()
        return touched

    def _collect_finished(self, touched: dict[int, Sequence], streams: _StreamingPolicy) -> list[Sequence]:
        finished: list[Sequence] = []
        for _, sequence in sorted(touched.items()):
            if sequence.finish_reason is not None:
                finished.append(sequence)
            elif streams.should_report(sequence):
                self._outputs.append(sequence.take_output())
            if sequence.finish_reason != "error" and self._scheduler.registers_while_decoding:
                self._scheduler.register(sequence, sequence.n_prompt + sequence.n_new - 1)
        return finished

    def _accept_table_drafts(
        self, pending: PendingTokens, drafts: TableDrafts, streams: _StreamingPolicy, ahead: TableDrafts | None
    ) -> list[Sequence]:
        """Accept a step with TableDrafts: tokens up to and with the first token that differs from its draft."""
        table, slots_B, number = self._scheduler.table, pending.slots_B, np.arange(drafts.n_rows)
        tokens_BR, logprobs_BR, inputs_BR = pending.wait_for_rows(drafts.n_rows)
        right_BJ, counts_B, stops_B = find_accepted_tokens(tokens_BR, inputs_BR, table.stop_ids[slots_B])
        is_wanted_B = table.owner[slots_B] == pending.owners_B
        right_BJ, counts_B = right_BJ & is_wanted_B[:, None], np.where(is_wanted_B, counts_B, 0)
        by_host_B = is_wanted_B & table.needs_host[slots_B]
        if not np.isfinite(logprobs_BR).all():
            self._has_bad_blocks = True  # a rejected row, too, may have left numbers in the cache
            by_host_B |= is_wanted_B & (~np.isfinite(logprobs_BR) & (number < counts_B[:, None])).any(1)
        wanted, plain = np.flatnonzero(is_wanted_B), np.flatnonzero(is_wanted_B & ~by_host_B)
        plain_slots, counts = slots_B[plain], counts_B[plain]
        for row in plain[table.n_staged[plain_slots] + counts > STAGED].tolist():
            pending.sequences[row].append_staged()
        table.stage_several(plain_slots, tokens_BR[plain], logprobs_BR[plain], counts, self._in_flight_version)
        by_host = {row: pending.sequences[row] for row in np.flatnonzero(by_host_B).tolist()}
        for row, sequence in by_host.items():
            counts_B[row] = self._accept_tokens(sequence, tokens_BR[row], logprobs_BR[row], int(counts_B[row]))
        drafts.verified(drafts, tokens_BR, counts_B, right_BJ)
        n_ahead = np.zeros(len(table.owner), dtype=np.int64)
        if ahead is not None:
            n_ahead[ahead.slots_B] = ahead.n_rows
        table.rewind(slots_B[wanted], n_ahead[slots_B[wanted]])
        self._n_generated += int(counts_B.sum())
        self._n_drafted += int((inputs_BR[wanted, 1:] >= 0).sum())
        self._n_accepted += int((right_BJ & (number[:-1] < counts_B[:, None])).sum())
        return self._collect_finished(self._find_affected(pending, plain, stops_B[plain], streams) | by_host, streams)

    def _accept_tokens(self, sequence: Sequence, tokens: np.ndarray, logprobs: np.ndarray, n: int) -> int:
        """Append up to `n` tokens to a sequence, until it ends. Return how many were appended."""
        n_before = sequence.n_new
        for token, logprob in zip(tokens[:n].tolist(), logprobs[:n].tolist(), strict=True):
            if not math.isfinite(logprob):
                self._fail_sample(sequence)
                break
            if sequence.accept(token, logprob, self._in_flight_version):
                break
        return sequence.n_new - n_before

    def _store_completions(self, finished: list[Sequence]) -> None:
        """If all tokens of a finished sequence are in the slot table, move them to its `completion`, as arrays."""
        whole = [sequence for sequence in finished if sequence.has_only_prompt]
        if whole:
            arrays = self._scheduler.table.take_staged([sequence.slot for sequence in whole])
            for sequence, completion in zip(whole, arrays, strict=True):
                sequence.completion = completion

    def _propose_drafts(self, sequences: list[Sequence]) -> Drafts:
        """Draft tokens. Return lists if a sequence has a grammar, a penalty or logit edits, otherwise TableDrafts."""
        assert self.drafter is not None
        drafts = self.drafter.propose(sequences)
        if isinstance(drafts, TableDrafts):
            if not self._scheduler.table.needs_host_drafts(drafts.slots_B):
                if self._in_flight:
                    follows_B = np.isin(drafts.slots_B, self._in_flight[0].slots_B)
                    drafts = replace(drafts, follows_B=follows_B)
                return drafts
            drafts = self.runner.ngrams.look_up(drafts)
        if any(drafts):
            for sequence in sequences:
                sequence.append_staged()
        return drafts

    def _accept_list_drafts(
        self, pending: PendingTokens, drafts: list[list[int]], streams: _StreamingPolicy
    ) -> list[Sequence]:
        """Accept a step whose drafts are lists: tokens up to and with the first token that differs from its draft."""
        tokens_N, logprobs_N = pending.wait_for_tokens()
        tokens, logprobs, top, raw = (
            tokens_N.tolist(),
            logprobs_N.tolist(),
            pending.wait_for_top_scores(),
            pending.wait_for_raw_logprobs(),
        )
        is_wanted_B = self._scheduler.table.owner[pending.slots_B] == pending.owners_B
        touched, found, row = dict[int, Sequence](), list[tuple[Sequence, int]](), 0
        for sequence, draft, is_wanted in zip(pending.sequences, drafts, is_wanted_B.tolist(), strict=True):
            first, row = row, row + 1 + len(draft)
            if not is_wanted:
                continue
            n_before, version = sequence.n_new, self._in_flight_version
            for at, drafted in zip(range(first, row), [*draft, None], strict=True):
                if not math.isfinite(logprobs[at]):
                    self._fail_sample(sequence)
                elif not sequence.accept(tokens[at], logprobs[at], version, top[at], raw[at]) and tokens[at] == drafted:
                    continue
                break
            found.append((sequence, self._count_verified(sequence, draft, sequence.n_new - n_before)))
            touched[first] = sequence
        if self.drafter is not None:
            self.drafter.count_verified(found)
        # A rejected row may have left numbers in the cache that are not finite.
        self._has_bad_blocks |= not np.isfinite(logprobs_N).all()
        return self._collect_finished(touched, streams)

    def _count_verified(self, sequence: Sequence, draft: list[int], n_new: int) -> int:
        n_right = n_accepted_tokens(sequence, draft, n_new)
        self._n_generated += n_new
        self._n_drafted += len(draft)
        self._n_accepted += n_right
        self._scheduler.table.rewind(np.array([sequence.slot]))
        if n_new:
            self.runner.note_verified(sequence, n_new)
        return n_right

    def _fail_sample(self, sequence: Sequence) -> None:
        """Finish a sample whose newest token has a NaN or infinite log-probability, with finish_reason "error".

        Raises EngineError if the weights of the model are not finite.
        """
        if self._finite_version != self.weights_version and not self.runner.model.has_finite_weights():
            raise non_finite_logits()
        self._finite_version = self.weights_version
        sequence.append_staged()
        sequence.finish_reason, self._has_bad_blocks = "error", True

    def _finish(self, sequences: list[Sequence], routes: list[HostCopy] | None = None) -> None:
        """Queue the outputs of finished sequences for `step`. `routes` are host copies of their tokens' experts."""
        for index, sequence in enumerate(sequences):
            if routes is None:
                self._outputs.append(sequence.take_output())
            else:
                self._awaiting.append((sequence.take_output(), routes[index]))
            request_id = sequence.request.request_id
            self.unfinished[request_id] -= 1
            if not self.unfinished[request_id]:
                del self.unfinished[request_id]
