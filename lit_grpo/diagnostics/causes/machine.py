"""Causes in the machine, the services and the data of a run."""

from __future__ import annotations

from lit_grpo.diagnostics.causes.cause import MONITOR, Cause
from lit_grpo.stopping import ExitCode

FEWER_ROWS = (
    "Lower `max_concurrent` of `HFEngine` (`--model.engine HFEngine --model.engine.max_concurrent "
    "64`) or `model.sampling.max_tokens`."
)
MEMORY_ADVICE = {
    "micro_batch": "Lower `model.update.max_tokens_per_micro_batch`, which leaves the gradient as "
    "it is; or set `model.policy.gradient_checkpointing: true`, `model.policy.lora` or "
    "`trainer.precision: bf16-mixed`.",
    "generation": FEWER_ROWS,
    "evaluation": FEWER_ROWS,
    "logprob": "Lower `model.update.max_tokens_per_micro_batch`; `objective.kl.coef: 0` needs no "
    "reference, and with LoRA the reference takes no memory.",
    "update": "Set `model.policy.lora`, or another optimizer: AdamW's moments take two values "
    "for each trained weight.",
    "": "Set `model.policy.dtype: bfloat16` with `model.policy.lora`; in a warm-up lower "
    "`data.prompts_per_step` and raise `trainer.accumulate_grad_batches`.",
}
"""Stage -> what to do if it runs out of memory."""

MACHINE = (
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
        more=(
            "`action: stop` of `StallWatchdog` ends a run that looks like a deadlock.",
            '"nothing is computed": a deadlock, or a wait for something that does not answer. In '
            "the stacks the main thread comes first, and a reward runs in a thread of its name.",
            '"something is computed": one long operation, such as a compilation, a model that is '
            "moved or a collective operation of the GPUs that waits for another process. Compare "
            "the logs of all processes, `run_rank1.log` and so on.",
            '"is slow but advances": the line says how far it is and how much longer it may take. '
            "The first `generation` of a new setup may take long: divide `prompts_per_step * "
            "group_size * max_tokens` by the tokens per second.",
        ),
        noticed_by="`StallWatchdog`",
        action="alert",
        then="alert; stop if `action: stop` is set",
        exit_code=ExitCode.STALLED,
    ),
    Cause(
        name="slow_stage",
        title="A stage got slow",
        meaning=(
            "A stage takes more than three times as long as usual, and at least a fifth of the "
            "step. The message says what is known of the reason: a judge's limits, longer "
            "completions, compilations, or a lack of memory."
        ),
        advice=("Compare the `timing/…` columns of `metrics.csv`.",),
        more=("See [slow steps](#steps-are-slow).",),
        noticed_by=MONITOR,
        patience=3,
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
        name="disk_full",
        title="The disk is full, or will be",
        meaning=(
            '"needs 16.1 GB, and its disk has 9.2 GB left" comes before a checkpoint or `final/` '
            "is written. A write that fails leaves the checkpoints that were written before, and "
            "ends the run."
        ),
        advice=(
            "Free some space, and resume the run, with `--ckpt_path auto` if it has no checkpoint "
            "yet.",
        ),
        more=(
            "Checkpoints of earlier runs are the first to delete. `lit-grpo fit RUN` resumes.",
            "If `final/` is what failed, or you need the model of another step, write it elsewhere "
            "with `lit-grpo checkpoints RUN --export DIR`.",
            '"takes 2.1 GB of host memory for a while" is the peak of a save: one file of the '
            "model, or the largest tensor of a checkpoint, on its way from the GPU.",
        ),
        noticed_by="`Checkpoints`, every write",
        then="warn before a save, stop when a write fails",
        exit_code=ExitCode.CRASHED,
    ),
    Cause(
        name="checkpoint_damaged",
        title="A checkpoint is damaged",
        meaning=(
            "It is not what was written, for example after a disk failed or a copy was cut short, "
            "or its weights are not finite. A resume passes over it."
        ),
        advice=(
            "`lit-grpo fit RUN` takes the newest intact one.",
            "`lit-grpo checkpoints RUN --verify` reads them all.",
        ),
        more=(
            "If none is intact, the command names what is wrong with each and ends: starting again "
            "would overwrite the run. Put an intact copy back, or set another `run_dir`.",
        ),
        noticed_by="a resume",
        then="pass over it; end if none is intact",
        exit_code=ExitCode.WRONG_INPUT,
    ),
    Cause(
        name="leaked_prompts",
        title="Held-out prompts are trained on",
        meaning=(
            "Prompts of the validation data are in the training data, too, with the same gold "
            "answer: `val/accuracy` partly measures memorisation."
        ),
        advice=(
            "Remove them from `data.train`.",
            "Or set `data.validation` to other prompts; `data.validation_size` holds out some of "
            "`data.train`.",
        ),
        more=("`lit-grpo prepare` removes repeated prompts and holds out rows for good.",),
        noticed_by="the start of a run, `lit-grpo doctor`",
    ),
    Cause(
        name="wandb_failed",
        title="wandb fails",
        meaning=(
            "A run does not need wandb. If it cannot start within a minute, since there is no "
            "login or no network, the run goes on, and wandb logs offline into the run directory. "
            "If it fails later, the run goes on without it. The exit code is that of the training, "
            "and `metrics.csv` is complete. This is done by the callback "
            "[`WandbTeardown`](configuration.md#wandbteardown), which every run with a "
            "`WandbLogger` has."
        ),
        advice=(
            "`lit-grpo wandb-sync RUN` sends later what was logged offline.",
            "With `--include_online` it also sends a run whose connection or service failed.",
        ),
        more=(
            "It exits with 1 if wandb could not send everything, and can be "
            "repeated. wandb writes into the run directory unless `trainer.logger` has a "
            "`save_dir` other than `.`, Lightning's default; the command reads the run's config to "
            "find it.",
            "`lit-grpo doctor` reports a missing login before the run.",
            "wandb shows a run as finished if training is done, else as failed, with the exit "
            "code, and `stop_reason` in the summary says why. A run that was killed shows as "
            "crashed after a few minutes.",
        ),
        noticed_by="`WandbTeardown`",
    ),
)
