"""Groups of layers that see equally far: how memory is divided, and that whoever reads a block finds what it wrote."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from areno.cost.kv_layout import KVGroup, KVLayout
from areno.engine.decoder.attention_split import split_attention
from areno.engine.decoder.block_manager import BlockManager, BlockTables
from areno.engine.decoder.scheduler import Scheduler, SchedulerOutput
from areno.engine.decoder.sequence import Sequence
from areno.models.config import TransformerConfig
from areno.models.families.gemma3 import GEMMA3
from areno.models.folder import RawConfig
from areno.types import GenerationRequest, SamplingParams

# How memory is divided ------------------------------------------------------------------------------------------------


def gemma(n_layers: int, window: int, context: int = 131072) -> TransformerConfig:
    """Of the pattern of Gemma 3: every sixth layer sees all tokens."""
    raw: dict[str, Any] = {
        "model_type": "gemma3_text",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 8,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "sliding_window": window,
    }
    return GEMMA3.read(RawConfig(raw, "config.json"))


def held_tokens(config: TransformerConfig, block_size: int, n_tokens: int) -> int:
    """Summed over layers, how many tokens' keys a layer must have, in whole blocks: the least that is possible."""
    windows = [config.layer_kind(layer).window or n_tokens for layer in range(config.num_layers)]
    return sum(-(-min(window, n_tokens) // block_size) * block_size for window in windows)


@pytest.mark.parametrize(("n_layers", "window"), [(26, 512), (34, 1024), (48, 1024), (62, 1024)])
def test_a_long_row_of_gemma_takes_hardly_more_than_its_layers_see(n_layers: int, window: int) -> None:
    config = gemma(n_layers, window)
    layout = KVLayout.from_config(config, 32, 32768)
    assert layout.n_tables <= 8
    taken, before = layout.sequence_size(32768) * 32, n_layers * 32768
    assert held_tokens(config, 32, 32768) <= taken < 1.25 * held_tokens(config, 32, 32768)
    assert taken < 0.26 * before
    assert layout.blocks_for(32768) + 2 * layout.n_tables >= sum(
        group.n_tables * (1024 if group.window is None else window // 32 + 1) for group in layout.groups
    )


def test_each_layer_has_a_place_of_its_own() -> None:
    layout = KVLayout.from_config(gemma(34, 1024), 32, 32768)
    assert len(set(layout.places)) == 34
    of_table = [group.window for group in layout.groups for _ in range(group.n_tables)]
    for layer, (table, place) in enumerate(layout.places):
        assert of_table[table] == (None if (layer + 1) % 6 == 0 else 1024)
        assert 0 <= place < layout.layers_per_block


def test_what_groups_would_not_save_is_one_group() -> None:
    config = gemma(26, 512)
    for layout in (KVLayout.from_config(config, 32, 512), KVLayout.from_config(config, 32, 32768, by_window=False)):
        assert layout.groups == (KVGroup(None),)
        assert (layout.n_tables, layout.layers_per_block, layout.pool_blocks(7)) == (1, 26, 7)
    all_local = KVLayout.from_config(gemma(5, 512), 32, 32768)
    assert all_local.groups == (KVGroup(512),)
    assert all_local.blocks_for(32768) == 18  # the window, a part of a block on either side, and the next one


def test_the_longest_row_that_fits() -> None:
    for config, most in ((gemma(26, 512), None), (gemma(5, 512), 4096), (gemma(26, 512, 512), None)):
        layout = KVLayout.from_config(config, 32, 32768)
        for n_blocks in (40, 300, 1000):
            n_tokens = layout.max_sequence_tokens(n_blocks, 4096)
            assert layout.blocks_for(n_tokens) <= n_blocks
            assert n_tokens == most or layout.blocks_for(n_tokens + 1) > n_blocks


def preemptions(n_samples: int, *, by_window: bool) -> int:
    """Of samples of 40 + 600 tokens that begin together, in the memory of 2,000 tokens of 24 layers, where 20 of these
    may have a window of 32 tokens."""
    layout = KVLayout.from_config(gemma(24, 32), 8, 640, by_window=by_window)
    scheduler = Scheduler(BlockManager(layout.pool_blocks(250), 8, layout.groups), 64, 4096)
    for number in range(n_samples):
        asked = GenerationRequest(request_id=number, prompt=[number] * 40, params=SamplingParams())
        common: dict[str, Any] = {"request": asked, "max_new": 600, "stop_ids": frozenset()}
        scheduler.waiting.append(Sequence(sample=0, key=0, tokens=[*asked.prompt], **common))
    while scheduler.has_work:
        plan = scheduler.schedule()
        for each in [*plan.decode, *(chunk.prefill.leader for chunk in plan.chunks if chunk.is_last)]:
            each.accept(7, 0.0, 0)
            scheduler.register(each, len(each.tokens) - 1)
        scheduler.remove_finished()
    scheduler.cache_departed()
    assert scheduler.blocks.n_available == scheduler.blocks.n_blocks
    return scheduler.n_preemptions


def test_four_times_as_many_long_samples_fit_at_once() -> None:
    assert preemptions(3, by_window=False) == 0 < preemptions(4, by_window=False)
    assert preemptions(13, by_window=True) == 0 < preemptions(18, by_window=True)


# What is read ---------------------------------------------------------------------------------------------------------

GROUPS = {
    "one": [KVGroup(None)],
    "local": [KVGroup(6)],
    "hybrid": [KVGroup(None), KVGroup(5, 3)],
    "wide": [KVGroup(None, 2), KVGroup(13), KVGroup(1, 2)],
}


class Device:
    """Remembers of which prefix each place of each block has the keys, and writes and reads as the runner does."""

    def __init__(self, blocks: BlockManager):
        self.blocks = blocks
        self.memory: dict[tuple[int, int], int] = {}  # (block, offset) -> the prefix that ends there
        self.tables: dict[tuple[int, int, int], int] = {}  # (table, slot, column) -> block
        self.n_prefix_groups = 0

    @staticmethod
    def token(sequence: Sequence, position: int) -> int:
        """Of a completion, too, whether it has arrived or not."""
        if position < sequence.n_prompt:
            return sequence.request.prompt[position]
        return hash((sequence.key, position)) % 3

    def prefix(self, sequence: Sequence, position: int) -> int:
        return hash(tuple(self.token(sequence, each) for each in range(position + 1)))

    def run(self, plan: SchedulerOutput) -> None:
        size = self.blocks.block_size
        prefilled = [each for chunk in plan.chunks if chunk.is_last for each in chunk.prefill.sequences]
        for sequence in prefilled + plan.decode:
            if sequence.block_tables.n_uploaded * size < sequence.block_tables.capacity:
                entries = BlockTables.take_new_entries([sequence.block_tables], [sequence.slot])
                for table, slot, column, block in entries.T.tolist():
                    self.tables[table, slot, column] = block
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                for block in self.group_blocks(chunk.prefill.leader, position):
                    self.memory[block, position % size] = self.prefix(chunk.prefill.leader, position)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                self.read_held(chunk.prefill.leader, position)
        for chunk in plan.chunks:
            for source, target in chunk.prefill.block_copies(self.blocks) if chunk.is_last else []:
                for offset in range(size):
                    self.memory[target, offset] = self.memory.get((source, offset), 0)
        for sequence in plan.decode:
            for table in range(self.blocks.blocks_over_all_groups):
                block = self.tables[table, sequence.slot, (sequence.n_kv - 1) // size]
                self.memory[block, (sequence.n_kv - 1) % size] = self.prefix(sequence, sequence.n_kv - 1)
        for sequence in plan.decode:
            self.read_held(sequence, sequence.n_kv - 1)
            self.read_table(sequence, sequence.slot, 0, sequence.n_kv)
        self.read_in_teams(plan.decode)

    def group_blocks(self, sequence: Sequence, position: int) -> list[int]:
        column = position // self.blocks.block_size
        return [
            block
            for group_blocks in sequence.block_tables.group_blocks
            for block in self.blocks.physical_blocks(group_blocks[column])
        ]

    def read_held(self, sequence: Sequence, position: int) -> None:
        size = self.blocks.block_size
        for group, group_blocks in zip(self.blocks.groups, sequence.block_tables.group_blocks, strict=True):
            for seen in range(0 if group.window is None else max(0, position + 1 - group.window), position + 1):
                for block in self.blocks.physical_blocks(group_blocks[seen // size]):
                    assert self.memory[block, seen % size] == self.prefix(sequence, seen)

    def read_table(self, sequence: Sequence, slot: int, start: int, end: int) -> None:
        """What the next token of `sequence` sees of the positions [start, end), by the table of a slot."""
        size = self.blocks.block_size
        windows = [group.window for group in self.blocks.groups for _ in range(group.n_tables)]
        for table, window in enumerate(windows):
            least = 0 if window is None else sequence.n_kv - window
            for seen in range(max(start, least), end):
                block = self.tables[table, slot, seen // size]
                assert self.memory[block, seen % size] == self.prefix(sequence, seen)

    def read_in_teams(self, sequences: list[Sequence]) -> None:
        """The shared part of prompts, which the first of a group reads for all."""
        if not sequences:
            return
        options: dict[str, Any] = {"max_groups": 4, "n_heads": 1, "n_multiprocessors": 1}
        options["lengths_B"] = np.array([sequence.n_kv for sequence in sequences])
        windows = self.blocks.has_windows
        made = split_attention(sequences, self.blocks.block_size, group_size=3, has_windows=windows, **options)
        for group in [] if made.prefix_groups_GR is None else made.prefix_groups_GR:
            rows = [sequences[row] for row in group if row >= 0]
            self.n_prefix_groups += len(rows) > 1
            for row, sequence in zip(group, rows, strict=False):
                self.read_table(sequence, rows[0].slot, 0, made.shared_lens_B[row])


def arrive(scheduler: Scheduler, device: Device, plan: SchedulerOutput) -> None:
    sequences = [s for chunk in plan.chunks if chunk.is_last for s in chunk.prefill.sequences] + plan.decode
    for sequence in sequences:
        if sequence.finish_reason is None:
            sequence.accept(device.token(sequence, len(sequence.tokens)), -1.0, 0)
            scheduler.register(sequence, len(sequence.tokens) - 1)
    scheduler.remove_finished()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("groups", GROUPS)
def test_whoever_reads_a_block_finds_what_it_wrote(groups: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests, turns of conversations, shared prompts, aborts and preemptions; nothing is lost at the end."""
    monkeypatch.setattr("areno.engine.decoder.attention_split.MIN_SAVING", 0)
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    blocks_over_all_groups = sum(group.n_tables for group in GROUPS[groups])
    layout = KVLayout(tuple(GROUPS[groups]), ((0, 0),), size)
    n_blocks = layout.blocks_for(40) + rng.choice([0, 10, 60]) * blocks_over_all_groups
    blocks = BlockManager(n_blocks, size, GROUPS[groups])
    scheduler, device = Scheduler(blocks, max_running=5, max_prefill_tokens=9), Device(blocks)
    everybody: list[Sequence] = []
    in_flight: SchedulerOutput | None = None
    for step in range(5000):
        if step < 120 and rng.random() < 0.3:
            everybody += (new := samples(rng, step, everybody))
            scheduler.waiting.extend(new)
        if rng.random() < 0.02 and everybody:
            scheduler.abort(rng.choice(everybody).request.request_id)
        if in_flight is not None and scheduler.is_short_of_blocks():
            arrive(scheduler, device, in_flight)
            in_flight = None
        plan = scheduler.schedule()
        device.run(plan)
        if in_flight is not None:
            arrive(scheduler, device, in_flight)
        in_flight = plan
        if step == 60:
            arrive(scheduler, device, plan)
            in_flight = None
            scheduler.preempt_all()
            blocks.reset()
        if step > 120 and not scheduler.has_work:
            break
    assert not scheduler.has_work
    for sequence in everybody:
        assert sequence.finish_reason == "abort" or len(sequence.logprobs) == sequence.max_new
    assert scheduler.n_cached_tokens > 0
    assert device.n_prefix_groups > 0
    scheduler.cache_departed()
    assert blocks.n_available == n_blocks
    free = [
        *blocks.free_blocks,
        *(block for first in blocks.cached_group_blocks for block in blocks.physical_blocks(first)),
    ]
    assert sorted(free) == list(range(n_blocks))


def samples(rng: random.Random, number: int, earlier: list[Sequence]) -> list[Sequence]:
    """Of a new prompt, or of the next turn of a conversation, 40 tokens long at most."""
    prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
    if earlier and rng.random() < 0.5:
        prompt = (rng.choice(earlier).tokens + prompt)[: rng.randrange(20, 36)]
    max_new = rng.randrange(1, 41 - len(prompt))
    n_samples = rng.randrange(1, 5)
    request = GenerationRequest(request_id=number, prompt=prompt, n_samples=n_samples, params=SamplingParams())
    common: dict[str, Any] = {"request": request, "max_new": max_new, "stop_ids": frozenset()}
    return [Sequence(sample=i, key=number * 10 + i, tokens=[*prompt], **common) for i in range(n_samples)]
