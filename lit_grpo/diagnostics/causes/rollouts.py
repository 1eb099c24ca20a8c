"""Causes in the completions, and in the engine that samples them."""

from __future__ import annotations

from lit_grpo.diagnostics.causes.cause import MONITOR, Cause
from lit_grpo.stopping import ExitCode

ROLLOUTS = (
    Cause(
        name="engine_outage",
        title="The rollout engine failed",
        meaning=(
            "A server died, hangs, or reports an older version of the weights. It is restarted "
            "and gets the weights again; when that fails `supervision.max_restarts` times, the run "
            "stops with a checkpoint from before the step."
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
        name="stale_rollouts",
        title="Groups are dropped because their weights are too old",
        meaning=(
            "`rollout/stale_fraction` is above 0: a token of each of these groups was sampled with "
            "weights that are more than `max_head_offpolicyness` optimizer steps older than the "
            "policy, by the `policy_versions` of its completion. If these are all groups, no "
            "optimizer step is taken."
        ),
        advice=(
            "With an engine of your own, set `policy_versions` to the version that the last "
            "`load_weights` was given, and sample with these weights.",
            "If such old weights are intended, raise `model.max_head_offpolicyness`.",
        ),
        noticed_by="`ZeroRewardBreaker`",
        patience=5,
        action="alert",
        then="stop after 10",
        exit_code=ExitCode.NO_REWARD,
        is_trouble=True,
    ),
    Cause(
        name="truncated",
        title="Completions are truncated",
        meaning=(
            "More than half of the completions reached `sampling.max_tokens` before they ended, so "
            "their answers may be missing."
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
        noticed_by=MONITOR,
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
        noticed_by=MONITOR,
        patience=3,
        action="alert",
        is_trouble=True,
    ),
    Cause(
        name="identical_completions",
        title="Completions of a group are identical",
        meaning="In at least half of the groups all completions are the same and wrong.",
        advice=(
            "Raise `model.sampling.temperature`, check `top_p` and `top_k`, or use harder prompts.",
            "If the temperature is already high, the policy has collapsed: go back to an earlier "
            "checkpoint with a lower learning rate.",
        ),
        noticed_by=MONITOR,
    ),
    Cause(
        name="certain_policy",
        title="The policy is certain of everything",
        meaning="All log-probabilities of the sampler are near 0, so there is nothing to compare.",
        advice=(
            "Raise `model.sampling.temperature` or `model.objective.entropy.coef`, or use harder "
            "prompts.",
            "Exact zeros mean that the policy has collapsed (go back to an earlier checkpoint, "
            "with a lower learning rate), or that the engine reports none or samples greedily (set "
            "`model.sampling.temperature` above 0, and have the engine return the "
            "log-probabilities of the tokens that it samples).",
        ),
        noticed_by=MONITOR,
    ),
    Cause(
        name="sampler_mismatch",
        title="The sampler's logprobs differ",
        meaning=(
            "`sampler/logprob_difference_mean` is above 0.2 and more than five times its usual "
            "value: the completions were not sampled from the policy that is trained. Find out "
            "why if it is above 0.01 in float32, or 0.1 in bfloat16."
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
        noticed_by=MONITOR,
        patience=3,
        action="alert",
        is_trouble=True,
    ),
)
