"""The causes of trouble that a run knows: what each means, what to do, who acts, and when.

Messages of a run, `HealthMonitor` and ``docs/troubleshooting.md`` take their words from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_grpo.stopping import ExitCode

Action = Literal["ignore", "warn", "alert", "skip", "roll_back", "stop"]
"""``alert`` is a warning that `Alerts` sends; ``skip`` warns and leaves out the optimizer step."""


MEMORY_ADVICE = {
    "micro_batch": "Lower `model.update.max_tokens_per_micro_batch`, which leaves the gradient as "
    "it is; or set `model.policy.gradient_checkpointing: true`, `model.policy.lora` or "
    "`trainer.precision: bf16-mixed`.",
    "generation": "Lower `model.engine.init_args.max_concurrent` or `model.sampling.max_tokens`.",
    "evaluation": "Lower `model.engine.init_args.max_concurrent` or `model.sampling.max_tokens`.",
    "logprob": "Lower `model.update.max_tokens_per_micro_batch`; `objective.kl.coef: 0` needs no "
    "reference, and with LoRA the reference takes no memory.",
    "update": "Set `model.policy.lora`, or another optimizer: its moments take two values for each "
    "trained weight.",
    "": "Set `model.policy.dtype: bfloat16` with `model.policy.lora`; in a warm-up lower "
    "`data.prompts_per_step` and raise `trainer.accumulate_grad_batches`.",
}
"""Stage -> what to do if it runs out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One kind of trouble."""

    name: str
    title: str
    meaning: str
    """How it shows, and why it matters; Markdown."""
    advice: tuple[str, ...]
    """What to do, the likeliest remedy first; sentences in Markdown."""
    more: tuple[str, ...] = ()
    """Further remedies, for the documentation only."""
    noticed_by: str
    patience: int = 1
    """Rollout steps in a row before somebody acts."""
    action: Action = "warn"
    then: str = ""
    """What follows, where a single word does not say it."""
    exit_code: ExitCode | None = None
    """Exit code of a run that it ends."""
    is_trouble: bool = False
    """Whether a checkpoint of such a step is not a healthy one."""

    @property
    def remedies(self) -> tuple[str, ...]:
        """The advice as sentences of a message, without marks of Markdown."""
        return tuple(one.replace("`", "") for one in self.advice)

    @property
    def remedy(self) -> str:
        return " ".join(self.remedies)

    @property
    def actions(self) -> str:
        """What happens, and when, in words."""
        if self.then:
            first = f"{self.action} after {self.patience}, " if self.patience > 1 else ""
            return f"{first}{self.then}"
        action = self.action.replace("_", " ")
        return f"{action} after {self.patience}" if self.patience > 1 else action


_MONITOR, _BREAKER = "`HealthMonitor`", "`ZeroRewardBreaker`"

_TABLE = (
    Cause(
        name="no_reward",
        title="The reward is 0",
        meaning=(
            "`reward/mean` is 0 and `reward/valid_fraction` is 1: the rewards work, and every "
            "value is 0. A failed reward is never a 0 here, so an outage looks different. The "
            "message says whether rewards stopped within a step (rather an outage behind your "
            "reward) or faded away over many (a collapse of the policy), and shows three "
            "completions."
        ),
        advice=(
            "Read ten rows of `completions/`: is the answer there, where the reward looks for it, "
            "in the format that it expects?",
            "Compare the column `answer` with the completion.",
            "If the policy cannot do the task yet, warm it up with `lit-grpo sft`, use easier "
            "prompts, or show the format in the prompt.",
            "After a collapse go on from a healthy checkpoint: `lit-grpo checkpoints RUN` lists "
            "them.",
        ),
        noticed_by=_BREAKER,
        patience=5,
        action="alert",
        then="stop after 10",
        exit_code=ExitCode.NO_REWARD,
        is_trouble=True,
    ),
    Cause(
        name="score_outage",
        title="Too many scores are missing",
        meaning=(
            "More than half of the step's rows have no score, for a reason outside the "
            "completions: the run pauses and asks again. No optimizer step is taken."
        ),
        advice=(
            "Repair the service, and the run continues by itself.",
            "Or end it with Ctrl-C and resume later, which repeats the same step.",
            "`model.outage` sets the fraction, the pauses and the time limit.",
        ),
        more=(
            "If half of the judge's calls fail permanently, use a second deployment rather than a "
            "larger fraction: a group is trained on whatever is left of it.",
        ),
        noticed_by="the score gate",
        then="pause for up to an hour, then stop",
        exit_code=ExitCode.SCORES_ABSENT,
    ),
    Cause(
        name="engine_outage",
        title="The rollout engine failed",
        meaning=(
            "A server died, hangs, or does not have the policy's weights. It is restarted and gets "
            "the weights again; when that fails `supervision.max_restarts` times, the run stops "
            "with a checkpoint from before the step."
        ),
        advice=(
            "Read the end of `RUN/engine/server_0.log`, which the message quotes.",
            "If it is out of memory, lower `launch.memory_fraction` or `launch.max_model_len`.",
        ),
        more=(
            'If it says "did not answer within", a large model needs a longer '
            "`supervision.startup_timeout`. A smaller `max-num-seqs` in `launch.flags`, or a GPU "
            "of its own with `launch.devices`, helps against a lack of memory, too.",
            '"does not sample from the policy\'s weights": a '
            "[weight check](engines.md#weight-checks) failed. The run ends at once; the linked "
            "section lists the known causes.",
            '"it hangs": none of the running completions has grown for '
            "`supervision.silence_timeout` seconds, and a request for a single token was not "
            "answered either. If the server is only slow, raise the timeouts.",
            '"completions could not be sampled": requests were refused, or failed again and again. '
            "For example, a prompt and its completion are longer than the server's "
            "`max_model_len`.",
        ),
        noticed_by="the engine's supervisor",
        then="restart the server 3 times, then stop",
        exit_code=ExitCode.ENGINE_FAILED,
    ),
    Cause(
        name="truncated",
        title="Completions are truncated",
        meaning=(
            "More than half of the completions reached `sampling.max_tokens` before they ended, so "
            "their answers are missing."
        ),
        advice=(
            "Raise `model.sampling.max_tokens`, reward shorter answers, or run `lit-grpo sft` "
            "first, so that the policy learns to end its answers.",
        ),
        more=(
            "The policy may never have learned to end: it is a base model, or its warm-up targets "
            "had no end. `lit-grpo sft` adds the end-of-sequence token, or in a conversation the "
            "end of the turn, to every target.",
            "The policy thinks longer than `max_tokens`: raise it, or set "
            "`data.chat_template_kwargs: {enable_thinking: false}` if the model has that switch.",
            "The model ends with a token that neither its tokenizer, its chat template nor its "
            "generation config names. Add it to `sampling.stop_token_ids`, or a string to "
            "`sampling.stop`.",
            "A chat model is used without its chat template: set `data.chat: true`.",
            "Length is rewarded: `aggregation: token` and `sequence_sum` favour long completions. "
            "Try `constant`, or add a `LengthReward`.",
        ),
        noticed_by=_MONITOR,
    ),
    Cause(
        name="empty",
        title="Completions are empty",
        meaning=(
            "At least half of the completions have no text: the policy ends them at once, as it "
            "may on prompts unlike those it has learned, or a server has lost its weights."
        ),
        advice=(
            "Look at the log of the engine's server if there is one, else run `lit-grpo "
            "sft` first.",
        ),
        noticed_by=_MONITOR,
        patience=3,
        action="alert",
        is_trouble=True,
    ),
    Cause(
        name="unparseable",
        title="A judge's replies cannot be parsed",
        meaning="At least half of the scores of a reward ended as `parse_error`.",
        advice=(
            "Read `detail/<name>` in `completions/` and compare the judge's prompt with "
            "its replies.",
            "Ask for a stricter format, or set `max_completion_tokens` higher.",
        ),
        noticed_by=_MONITOR,
        patience=3,
        action="alert",
    ),
    Cause(
        name="nothing_trained",
        title="No token is trained on",
        meaning=(
            "Every row of the step is invalid, filtered, or the only valid one of its group, so no "
            "optimizer step is taken."
        ),
        advice=(
            "Look at `reward/valid_fraction` and the outcomes in `completions/`.",
            "See `model.objective.overlong_filtering` and `model.sampling.max_tokens`.",
        ),
        noticed_by=_MONITOR,
        then="warn, after 50 in a row stop",
        exit_code=ExitCode.NO_REWARD,
    ),
    Cause(
        name="solved",
        title="All groups are solved",
        meaning=(
            "All rewards of the step are the best so far, after steps in which they differed. This "
            "is not a failure: there is nothing left to learn from these prompts."
        ),
        advice=("End the run, or use harder prompts.",),
        noticed_by=_MONITOR,
        patience=5,
    ),
    Cause(
        name="equal_rewards",
        title="Rewards are equal inside every group",
        meaning=(
            "All advantages are 0, so the step learns nothing from the rewards and the loss is 0: "
            "`reward/frac_zero_std` is 1. A reward that gives everything the same score looks like "
            "this from the first step on."
        ),
        advice=(
            "If the policy solves these prompts, use harder ones; if it solves none, use easier "
            "ones or more SFT steps; if the rewards should differ, check the reward.",
            "A larger `model.group_size` makes equal rewards rarer.",
        ),
        noticed_by=_MONITOR,
    ),
    Cause(
        name="cancelling_rewards",
        title="Rewards cancel out",
        meaning="Single rewards differ inside groups, but their weighted sums do not.",
        advice=("Change the weights, or set `model.advantage.combine: normalise_then_sum`.",),
        noticed_by=_MONITOR,
    ),
    Cause(
        name="no_advantage",
        title="Advantages are 0 although rewards differ",
        meaning="What is left after filtering has advantages of exactly 0.",
        advice=(
            "Raise `model.sampling.max_tokens`, or set `model.objective.overlong_filtering` to "
            "`false`.",
            "If nothing is filtered, check `model.advantage.function`.",
        ),
        noticed_by=_MONITOR,
    ),
    Cause(
        name="identical_completions",
        title="Completions of a group are identical",
        meaning="In at least half of the groups all completions are the same and not solved.",
        advice=(
            "Raise `model.sampling.temperature`, check `top_p` and `top_k`, or use harder prompts.",
            "If the temperature is already high, the policy has collapsed: go back to an earlier "
            "checkpoint with a lower learning rate.",
        ),
        noticed_by=_MONITOR,
    ),
    Cause(
        name="certain_policy",
        title="The policy is certain of everything",
        meaning="All log-probabilities of the sampler are near 0, so there is nothing to compare.",
        advice=(
            "Raise `model.sampling.temperature` or `model.objective.entropy.coef`, or use harder "
            "prompts.",
            "If they are exactly 0, the engine reports none, or it samples greedily: set "
            "`model.sampling.temperature` above 0, and have the engine return the "
            "log-probabilities of the tokens that it samples.",
        ),
        noticed_by=_MONITOR,
    ),
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
        noticed_by=_MONITOR,
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
        noticed_by=_MONITOR,
        patience=3,
        action="alert",
        is_trouble=True,
    ),
    Cause(
        name="sampler_mismatch",
        title="The sampler's logprobs differ",
        meaning=(
            "`sampler/logprob_difference_mean` is above 0.2 and more than five times its usual "
            "value: the completions were not sampled from the policy that is trained. Above 0.01 "
            "in float32, or 0.1 in bfloat16, it deserves a look."
        ),
        advice=(
            "With an engine of your own look for stale weights, another temperature, logprobs "
            "after top-p and top-k instead of before, or tokens that were encoded again from text.",
            "With the built-in engines compare precision and attention implementation.",
            "`objective.sampler_correction` limits the effect on the update.",
        ),
        more=(
            "`objective.off_policy_threshold` leaves out the sequences that do most harm. With "
            "`HFEngine` the cause is low precision, or an attention implementation that differs "
            "between prefill and training.",
        ),
        noticed_by=_MONITOR,
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
            "chooses one.",
            '"the policy\'s logits are not finite while sampling": the weights themselves have '
            "diverged. A checkpoint of such weights is passed over by a resume.",
        ),
        noticed_by=f"the update, {_MONITOR}",
        action="roll_back",
        then="skip the optimizer step, after 5 in a row roll back",
        exit_code=ExitCode.DIVERGED,
        is_trouble=True,
    ),
    Cause(
        name="not_finite_weights",
        title="The weights are not finite",
        meaning="A weight of the policy is NaN or infinite: whatever it samples is worthless.",
        advice=(
            "Lower the learning rate or `model.update.max_grad_norm`.",
            "Use float32 weights with `trainer.precision: bf16-mixed`.",
        ),
        noticed_by=_MONITOR,
        action="roll_back",
        exit_code=ExitCode.DIVERGED,
        is_trouble=True,
    ),
    Cause(
        name="stalled",
        title="No progress",
        meaning=(
            "No stage ended, and no completion or token was added, for much longer than usual. The "
            "message says in which stage, how far it was, and whether anything is computed, which "
            "tells a deadlock from a step that is only long. `run.log` has the stacks of all "
            "threads."
        ),
        advice=(
            "If nothing is computed, look at the stacks for what is waited for: a reward without "
            "`timeout_seconds`, a server that does not answer, or another rank that is dead.",
            "If it is only slow, wait, or lower `data.prompts_per_step`, `model.group_size` or "
            "`model.sampling.max_tokens`.",
        ),
        more=("`action: stop` of `StallWatchdog` ends a run that looks like a deadlock.",),
        noticed_by="`StallWatchdog`",
        action="alert",
        then="alert; stop if `action: stop` is set",
        exit_code=ExitCode.STALLED,
    ),
    Cause(
        name="out_of_memory",
        title="Out of memory",
        meaning=(
            "The message names the stage and the setting to lower. The last checkpoint stays. The "
            "longest micro-batches come first, so a step that survives its first micro-batch "
            "survives the others."
        ),
        advice=tuple(
            f"{f'In stage `{stage}`' if stage else 'Elsewhere'}: {advice[0].lower()}{advice[1:]}"
            for stage, advice in MEMORY_ADVICE.items()
        ),
        more=(
            "`TimingLog` with `stages: true` logs the memory at the end of each stage. A single "
            "row that exceeds the token budget still runs, alone.",
        ),
        noticed_by="every stage",
        action="stop",
        exit_code=ExitCode.CRASHED,
    ),
    Cause(
        name="slow_stage",
        title="A stage got slow",
        meaning=(
            "A stage takes more than three times as long as usual, and at least a fifth of the "
            "step. The message says what is known of the reason: a judge's limits, longer "
            "completions, compilations, or a lack of memory."
        ),
        advice=(
            "Compare the `timing/…` columns of `metrics.csv`; see [slow steps](#steps-are-slow).",
        ),
        noticed_by=_MONITOR,
        patience=3,
    ),
)

CAUSES = {cause.name: cause for cause in _TABLE}
"""Name -> cause."""
