"""The passes of a teacher over the micro-batches of a student, for a divergence over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from areno.config.teacher import Divergence
from areno.engine.profiling import phase
from areno.engine.train.packing import LocalTokens, PackedTokens, PrefixPass
from areno.kernels.logprobs import Teacher
from areno.kernels.logprobs.divergence import CommonTokenIds, FullVocabTeacher, TopKTeacher
from areno.kernels.logprobs.entropy import Negentropy
from areno.layers.attention import PrefixKeys
from areno.loss_fns.data_pack import DataPack
from areno.specs.update import UpdateSpec

RunLayers = Callable[[PackedTokens, PrefixKeys | None], tuple[Tensor, LocalTokens]]


class TeacherPasses:
    """Runs the layers of a teacher, without gradient, before the student's pass over the same micro-batch.

    Only the last hidden states of the tokens to predict are kept, in the dtype of the weights, until the student's
    backward pass has ended. The head computes logits from them, chunk by chunk. Hidden states of a whole step would
    take more memory than those of one micro-batch.

    If the teacher is the student without its adapters, `switch` returns a context in which the adapters are off.
    `common` are the token ids over which both models are compared.
    """

    def __init__(
        self,
        run: RunLayers,
        logits: Callable[[Tensor], Tensor],
        divergence: Divergence,
        switch: Callable[[], AbstractContextManager[None]] = nullcontext,
        common: CommonTokenIds | None = None,
    ):
        self._run, self._logits, self._divergence, self._switch = run, logits, divergence, switch
        self._common = common
        self._prefix_of_student: PrefixPass | None = None
        self._prefix: PrefixPass | None = None  # of the teacher, over the tokens of `_prefix_of_student`

    @torch.no_grad()
    def run(self, packed: PackedTokens) -> FullVocabTeacher:
        """Run the teacher on the student's input, for the T positions whose next tokens are predicted."""
        with self._switch(), phase("teacher", tokens=packed.n_computed):
            theirs = packed.for_teacher
            if theirs is None:
                theirs = replace(packed, routes_NLk=None, prefix=self._run_prefix(packed.prefix))
            hidden_nE, share = self._run(theirs, None)
            hidden_TE = share.select_predecessors(hidden_nE, theirs.indices_to_predict())[1]
        return FullVocabTeacher(hidden_TE, self._logits, self._divergence, self._common)

    def _run_prefix(self, prefix: PrefixPass | None) -> PrefixPass | None:
        """Run the teacher once on prefixes that several micro-batches share. Returns the teacher's PrefixPass."""
        if prefix is not None and prefix is not self._prefix_of_student:
            self.end()
            self._prefix = PrefixPass(replace(prefix.packed, routes_NLk=None))
            self._prefix.begin(lambda packed, stores: self._run(packed, stores)[0])
        self._prefix_of_student = prefix
        return None if prefix is None else self._prefix

    def end(self) -> None:
        if self._prefix is not None:
            self._prefix.end()
        self._prefix = self._prefix_of_student = None


class Teachers:
    """Holds one teacher of an update on the device at a time, and swaps it between micro-batches.

    `hold` returns a context in which the model of a role is on the device. `default` is the teacher of rows that name
    none.
    """

    def __init__(self, hold: Callable[[str], AbstractContextManager[TeacherPasses]], default: str):
        self._hold, self._default = hold, default
        self._role, self._stack = "", ExitStack()
        self._passes: TeacherPasses | None = None

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
        self._stack.close()

    def run(self, packed: PackedTokens) -> FullVocabTeacher:
        role = packed.teacher or self._default
        if self._passes is None or role != self._role:
            self.end()
            self._passes = None  # also if memory runs out below: the last teacher has left the device
            self._stack.close()
            self._role, self._passes = role, self._stack.enter_context(self._hold(role))
        return self._passes.run(packed)

    def end(self) -> None:
        if self._passes is not None:
            self._passes.end()


def entropy_teacher(update: UpdateSpec | None) -> Teacher | None:
    return Negentropy() if update is not None and update.differentiates_entropy else None


def listed_teacher(packed: PackedTokens, pack: DataPack, indices_T: Tensor, divergence: Divergence) -> Teacher | None:
    """Return a teacher made of the log-probabilities in `TrainSequence.teacher_top`. None if the rows have none."""
    if pack.teacher_top_tokens is None or pack.teacher_top_logprobs is None:
        return None
    indices_U = indices_T
    if packed.shared is not None:  # rows that share a token have equal lists for it, if both train on it
        trained_U = pack.trained_T
        index_N = torch.zeros(len(packed.tokens_N), dtype=torch.int64, device=indices_T.device)
        index_N[packed.shared.indices_U[trained_U]] = trained_U
        indices_U = index_N[indices_T]
    return TopKTeacher(pack.teacher_top_tokens[indices_U], pack.teacher_top_logprobs[indices_U], divergence)
