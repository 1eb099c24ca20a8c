"""The coefficients of the KL and the entropy term, which may adapt to a target during a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lit_grpo.objective import Objective
from lit_grpo.objective.entropy import EntropyControl
from lit_grpo.objective.kl import KLControl


class Coefficients:
    """The current coefficients, and how they change after each step."""

    def __init__(self, objective: Objective) -> None:
        self.kl = KLControl(term=objective.kl, coef=objective.kl.coef)
        self.entropy = EntropyControl(term=objective.entropy, coef=objective.entropy.coef)

    def adapt_kl(self, values: dict[str, float], num_rows: int) -> None:
        """Adapt the coefficient of the next rollout step to the divergence of this one.

        Args:
            values: The metrics of the step over all ranks; gets the coefficient that it had.
            num_rows: Completions of a step.
        """
        if self.kl.term.target is not None and "policy/kl" in values:
            values["policy/kl_coef"] = self.kl.coef
            self.kl = self.kl.after_step(values["policy/kl"], num_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of them, and with which values they began."""
        return {
            "kl_coef": self.kl.coef,
            "entropy_control": {
                "coef": self.entropy.coef,
                "last_entropy": self.entropy.last_entropy,
            },
            "configured_coefs": self._configured(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficients that adapt to a target, unless the config has another start."""
        saved = state.get("configured_coefs", self._configured())
        if self.kl.term.target is not None and saved["kl"] == self.kl.term.coef:
            self.kl = replace(self.kl, coef=state["kl_coef"])
        kept, term = dict(state["entropy_control"]), self.entropy.term
        if term.target is None or saved["entropy"] != term.coef:
            kept["coef"] = term.coef
        self.entropy = replace(self.entropy, **kept)

    def _configured(self) -> dict[str, float]:
        return {"kl": self.kl.term.coef, "entropy": self.entropy.term.coef}
