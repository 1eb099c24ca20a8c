"""Causes in the rewards, and in the signal that they give."""

from __future__ import annotations

from lit_grpo.diagnostics.causes.cause import MONITOR, Cause
from lit_grpo.stopping import ExitCode

STOP_BY_RULE = (
    "The run goes on, since other prompts may come. To end it after so many steps in a row: "
    "`rules: {{{}: {{patience: 50, action: stop}}}}` of "
    "[`HealthMonitor`](configuration.md#healthmonitor)."
)

REWARDS = (
    Cause(
        name="no_reward",
        title="The reward is 0",
        meaning=(
            "`reward/mean` is 0 and `reward/valid_fraction` is 1: the rewards work, and every "
            "value is 0. A failed reward is never a 0 here, so an outage looks different. The "
            "message says whether rewards stopped within a step (which points to an outage behind "
            "your reward) or faded away over many (a collapse of the policy), and shows three "
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
        more=(
            "After the stop the last checkpoint is from the end of the streak. Steps without a "
            "valid row took no optimizer step, but steps with rewards of 0 did, in which momentum, "
            "KL and entropy terms changed the policy. `Checkpoints` keeps the newest checkpoint "
            "from before the streak: `lit-grpo checkpoints RUN --recover` chooses it for the next "
            "`lit-grpo fit RUN`, or `lit-grpo fit RUN --ckpt_path FILE` goes on from it. The last "
            "line of such a run names that command; without a change the run would stop again.",
            "If long streaks without a reward are normal for the task, raise `stop_after` of "
            "[`ZeroRewardBreaker`](configuration.md#zerorewardbreaker).",
        ),
        noticed_by="`ZeroRewardBreaker`",
        patience=5,
        action="alert",
        then="stop after 10",
        exit_code=ExitCode.NO_REWARD,
        is_trouble=True,
    ),
    Cause(
        name="nothing_scored",
        title="No completion could be scored",
        meaning=(
            "In every step of the streak no row had a value of all rewards, and "
            "`reward/valid_fraction` was 0. No optimizer step was taken. This happens only if "
            "`model.outage` lets such steps pass, or if a reward returns None for every row."
        ),
        advice=(
            "The message names the reward and how its scores ended: fix that first. Each row of "
            "completions/ has the outcome and its detail.",
            "If a reward returns None for rows of other sources, let it score some of every step.",
        ),
        noticed_by="`ZeroRewardBreaker`",
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
            "A spent budget of a judge ends the run at once: raise `limits.max_cost_usd`, and "
            "resume. So does a failed call of a reward with `on_error: raise`.",
        ),
        noticed_by="the score gate",
        then="pause for up to an hour, then stop",
        exit_code=ExitCode.SCORES_ABSENT,
    ),
    Cause(
        name="reward_bug",
        title="A reward has a bug",
        meaning=(
            "The code of a reward fails on every row, or on more rows than "
            "`model.outage.max_absent_fraction` allows: it raises an exception such as `KeyError` "
            "for a column that the data does not have, or returns something that is not a number. "
            "A retry does not help, so the run ends with the traceback, without training on the "
            "step."
        ),
        advice=(
            "Read the last lines of the traceback, which point to your code.",
            "Try the reward without training, with the same config: `lit-grpo rewards`.",
            "Return `None` for a completion that cannot be scored.",
            "Repair it, and go on with `lit-grpo fit RUN`.",
        ),
        more=(
            "If a reward waits for a service, let it raise `ConnectionError` while that is down: "
            "the run then pauses and asks again. `OSError`, `RuntimeError` and the exceptions of "
            "client libraries count as an outage, too. So does every exception of an `async def` "
            "reward that has worked before.",
        ),
        noticed_by="the score gate, an evaluation",
        action="stop",
        exit_code=ExitCode.CRASHED,
    ),
    Cause(
        name="judge_refused",
        title="The judge refuses at the start",
        meaning=(
            "Before a model is loaded every judge is asked a test question. If it refuses, one "
            "line says which variable, address or name to set."
        ),
        advice=(
            "A 401 points to the key, a 403 to the role or the network, a 404 to the deployment's "
            "name, the address or the `api_version`.",
            "A key and a token may both be in the environment: `auth` decides which one is used.",
            "`lit-grpo judge-check --config my.yaml` asks again without loading a model.",
        ),
        more=("[Judges](judges.md#where-the-judge-runs) lists the settings of each service.",),
        noticed_by="the judge",
        then="end before training",
        exit_code=ExitCode.WRONG_INPUT,
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
        noticed_by=MONITOR,
        patience=3,
        action="alert",
    ),
    Cause(
        name="solved",
        title="All groups are solved",
        meaning=(
            "All rewards of the step are the best so far, after steps in which they differed. This "
            "is not a failure: there is nothing left to learn from these prompts."
        ),
        advice=("End the run, or use harder prompts.",),
        noticed_by=MONITOR,
        patience=5,
        alert_after=10,
    ),
    Cause(
        name="unsolved",
        title="All groups fail",
        meaning=(
            "All rewards of the step are the worst so far, after steps in which they differed: "
            "for example, each is -1 where a right answer gets 1. All advantages are 0. If the "
            "worst reward is 0, [the breaker](#the-reward-is-0) acts as well."
        ),
        advice=(
            "Use easier prompts, a larger `model.group_size`, or run `lit-grpo sft` first.",
            "If the policy solved such prompts before, go back to a healthy checkpoint "
            "(`lit-grpo checkpoints RUN`), or look for an outage behind the reward.",
        ),
        more=(STOP_BY_RULE.format("unsolved"),),
        noticed_by=MONITOR,
        patience=5,
        alert_after=10,
        is_trouble=True,
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
        more=(STOP_BY_RULE.format("equal_rewards"),),
        noticed_by=MONITOR,
        alert_after=10,
    ),
    Cause(
        name="cancelling_rewards",
        title="Rewards cancel out",
        meaning="Individual rewards differ inside groups, but their weighted sums do not.",
        advice=("Change the weights, or set `model.advantage.combine: normalise_then_sum`.",),
        noticed_by=MONITOR,
        alert_after=10,
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
        noticed_by=MONITOR,
        alert_after=10,
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
        noticed_by=MONITOR,
        alert_after=10,
        then="stop after 50",
        exit_code=ExitCode.NO_REWARD,
    ),
)
