"""Ways in which a policy loss uses the log-probabilities that a teacher gives to the sampled tokens.

A signal is a class that declares its settings and its formula. The setting `actor.teacher_signal` chooses a class by
the name under which TEACHER_SIGNALS has registered it. To add a signal, write a class with `TEACHER_SIGNALS.register`.

The gap of a token is log p_T - log p, the difference of its log-probabilities under the teacher and under the trained
policy. The teacher is often the policy itself with the solution in its prompt. The module imports no torch, because the
configuration of a run is read before torch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from areno.schema.choices import Choices
from areno.schema.fields import Section, setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class TeacherSignal(Section):
    """Base class of signals. The fields of a subclass are keys of the section `actor.<name>`."""

    def advantages(self, advantages_T: Tensor, gap_T: Tensor) -> Tensor:
        """Return the advantages of the policy loss. The gap has no gradient."""
        return advantages_T

    def losses(self, gap_T: Tensor) -> Tensor | None:
        """Return a loss of each token, which is reduced like the policy loss and added. The gap has a gradient."""
        return None


TEACHER_SIGNALS: Choices[TeacherSignal] = Choices("teacher_signal")


@TEACHER_SIGNALS.register(
    "rlsd", section=True, help="the teacher scales the advantage of each token (RLSD, arXiv 2604.03128)"
)
@dataclass(kw_only=True)
class RLSD(TeacherSignal):
    """RLSD (arXiv 2604.03128): A (1 - mix + mix clip(exp(sgn(A) gap), 1 - eps, 1 + eps)), without gradient.

    The reward decides the sign of an update and the teacher its size.
    """

    mix: float = setting(0.5, help="Share of the factor that the teacher decides", gt=0, le=1)
    eps: float = setting(0.2, help="The factor of the teacher is clipped to [1 - eps, 1 + eps]", gt=0, le=1)

    def advantages(self, advantages_T: Tensor, gap_T: Tensor) -> Tensor:
        factor_T = (advantages_T.sign() * gap_T).clamp(-20.0, 20.0).exp().clamp(1.0 - self.eps, 1.0 + self.eps)
        return advantages_T * (1.0 - self.mix + self.mix * factor_T)


@TEACHER_SIGNALS.register(
    "sdar", section=True, help="tokens that the teacher finds likelier are reinforced (SDAR, arXiv 2605.15155)"
)
@dataclass(kw_only=True)
class SDAR(TeacherSignal):
    """SDAR (arXiv 2605.15155): adds coef mean of sg(sigmoid(beta gap)) gap to the loss, sg without gradient.

    Its gradient raises the log-probability of a token by coef sigmoid(beta gap): hardly, if the teacher finds the token
    less likely than the policy does.
    """

    coef: float = setting(0.1, help="Factor on the loss of the signal", gt=0)
    beta: float = setting(5.0, help="Steepness of the gate", gt=0)

    def losses(self, gap_T: Tensor) -> Tensor | None:
        return self.coef * (self.beta * gap_T.detach()).sigmoid() * gap_T


@dataclass(kw_only=True)
@TEACHER_SIGNALS.with_sections
class TeacherSignalConfig(Section):
    """The choice of a signal, with the settings of all of them. The actors of GRPO and PPO inherit from it."""

    teacher_signal: Literal[tuple(TEACHER_SIGNALS)] | None = setting(  # type: ignore[valid-type]
        None,
        help="How the policy loss uses the teacher's log-probabilities, besides the loss of distillation. "
        f"{TEACHER_SIGNALS.help}. null: not at all",
    )

    @property
    def uses_teacher_logprobs(self) -> bool:
        """Whether the policy loss reads the teacher's log-probabilities."""
        return self.teacher_signal is not None

    def teacher_signal_settings(self) -> dict[str, Any]:
        """Return the chosen signal as keyword argument of `grpo_loss_fn`."""
        return {"teacher_signal": TEACHER_SIGNALS.chosen(self)}
