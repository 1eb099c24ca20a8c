"""Causes in the policy: its weights, its gradients, its collapse."""

from __future__ import annotations

from lit_grpo.diagnostics.causes.cause import MONITOR, Cause
from lit_grpo.stopping import ExitCode

POLICY = (
    Cause(
        name="collapse",
        title="The policy collapses",
        meaning=(
            "The reward fell to less than 80% of its usual value while completions became much "
            "shorter, the entropy vanished, or most completions repeat themselves."
        ),
        advice=(
            "Go back to a healthy checkpoint (`lit-grpo checkpoints RUN`) with a lower learning "
            "rate, an `objective.kl.coef` or an `objective.entropy.coef`.",
        ),
        noticed_by=MONITOR,
        patience=3,
        action="alert",
        is_trouble=True,
    ),
    Cause(
        name="kl_explosion",
        title="The KL divergence explodes",
        meaning=(
            "`policy/kl` is above 0.5 and more than ten times its usual value: the policy is far "
            "from its reference."
        ),
        advice=(
            "Lower the learning rate, or raise `objective.kl.coef`.",
            "Go back to a healthy checkpoint, or let the run do it: `action: roll_back`.",
        ),
        noticed_by=MONITOR,
        patience=3,
        action="alert",
        is_trouble=True,
    ),
    Cause(
        name="not_finite_gradient",
        title="The gradient is not finite",
        meaning=(
            "An optimizer step whose gradient has a NaN or an infinite norm is skipped on all "
            "ranks and logged; one in thousands is harmless, and the weights stay as they were. "
            "After `model.update.max_skipped_steps` in a row the run is rolled back. Without "
            "`HealthMonitor`, or a checkpoint to go back to, it stops."
        ),
        advice=(
            "If your objective has functions of your own, check them first.",
            "Lower the learning rate or `model.update.max_grad_norm`, or use `bf16-mixed` with "
            "float32 weights instead of bfloat16 weights.",
        ),
        more=(
            "Go back to an earlier checkpoint: `lit-grpo checkpoints RUN` lists them, `--recover` "
            "chooses one. When the run goes on from it, its rows, completions and checkpoints of "
            "later steps are replaced: copy the run directory first if you want to keep them.",
            '"the policy\'s logits are not finite while sampling": the weights themselves have '
            "diverged. A checkpoint of such weights is passed over by a resume.",
        ),
        noticed_by=f"the update, {MONITOR}",
        action="roll_back",
        then="skip the optimizer step, after 5 in a row roll back",
        exit_code=ExitCode.DIVERGED,
        is_trouble=True,
    ),
    Cause(
        name="not_finite_weights",
        title="The weights are not finite",
        meaning="A weight of the policy is NaN or infinite, so its completions are useless.",
        advice=(
            "Lower the learning rate or `model.update.max_grad_norm`.",
            "Use float32 weights with `trainer.precision: bf16-mixed`.",
        ),
        noticed_by=MONITOR,
        action="roll_back",
        exit_code=ExitCode.DIVERGED,
        is_trouble=True,
    ),
)
