"""The coefficient of the entropy bonus, which can adapt to the entropy."""

from __future__ import annotations

from dataclasses import dataclass

from lit_grpo.objective.terms import EntropyTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyControl:
    """The state of the coefficient between two optimizer steps.

    Source: Skywork-OR1, arXiv 2505.22312 equation 3.2.
    """

    term: EntropyTerm
    coef: float
    last_entropy: float = float("inf")
    """Nats per token in the last optimizer step."""

    @property
    def applied_coef(self) -> float:
        """The coefficient for the next optimizer step; 0 while the entropy is above the target."""
        target = self.term.target
        return self.coef if target is None or self.last_entropy <= target else 0.0

    def after_step(self, entropy: float) -> EntropyControl:
        """Return the state after an optimizer step with this mean entropy, in nats per token."""
        term = self.term
        if term.target is None:
            return self
        step = term.coef_step if entropy <= term.target else -term.coef_step
        coef = min(max(self.coef + step, term.coef_min), term.coef_max)
        return EntropyControl(term=term, coef=coef, last_entropy=entropy)
