"""The coefficient of the entropy bonus as it follows the entropy. Knows no loss."""

from __future__ import annotations

from dataclasses import dataclass

from lit_grpo.objective.config import EntropyTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyControl:
    """The coefficient between two optimizer steps.

    Source: Skywork-OR1, arXiv 2505.22312 equation 3.2.
    """

    term: EntropyTerm
    coef: float
    last_entropy: float = float("inf")
    """Nats a token, of the optimizer step before."""

    @property
    def applied_coef(self) -> float:
        """The coefficient of the coming optimizer step."""
        target = self.term.target
        return self.coef if target is None or self.last_entropy <= target else 0.0

    def after_step(self, entropy: float) -> EntropyControl:
        """The control after an optimizer step of this mean entropy, in nats a token."""
        term = self.term
        if term.target is None:
            return self
        step = term.coef_step if entropy <= term.target else -term.coef_step
        coef = min(max(self.coef + step, term.coef_min), term.coef_max)
        return EntropyControl(term=term, coef=coef, last_entropy=entropy)
