"""Causes that end a run, or keep one from starting, although nothing is wrong with its training."""

from __future__ import annotations

from lit_grpo.diagnostics.causes.cause import Cause
from lit_grpo.stopping import ExitCode

GO_ON = "Run the same command with `--ckpt_path auto` to continue."

ENDS = (
    Cause(
        name="wrong_input",
        title="The command, the config or the data is wrong",
        meaning=(
            "One line says what, and what to change. If training had begun, the traceback is in "
            "`run.log`."
        ),
        advice=(
            "Change what the line says.",
            "`lit-grpo doctor --config my.yaml` checks more than the first error.",
        ),
        more=("For keys and classes see [below](#a-key-or-class-is-not-known).",),
        noticed_by="every command",
        then="end",
        exit_code=ExitCode.WRONG_INPUT,
    ),
    Cause(
        name="row_refused",
        title="A row or a gold answer is refused",
        meaning="The error names file, row and fix.",
        advice=(
            "`data.columns: {answer: NAME}` selects the column of the gold answers.",
            "`data.require_answer: false` is for rewards that need none.",
        ),
        more=(
            '"every gold answer must be a number, LaTeX or up to three words" comes from '
            "`MathReward`, in training or as `evaluation.accuracy`: use a column with the bare "
            "answer, mark it as `\\boxed{x}` or `#### x`, or set `evaluation.accuracy` to another "
            "reward. `25%` is read as 25: a percent sign is a unit.",
        ),
        noticed_by="the data, a reward",
        then="end before training",
        exit_code=ExitCode.WRONG_INPUT,
    ),
    Cause(
        name="time_is_up",
        title="The time is up",
        meaning="The run ended in time for its checkpoint and is not done.",
        advice=(GO_ON,),
        more=(
            '"the SLURM job ends at": see [SLURM](guides/slurm.md). "leave_by is": the time that '
            "you gave.",
            '"trainer.max_time is reached": it counts all parts of a run together, so a resumed '
            "run needs a larger one.",
            "If a checkpoint was cut short all the same, the save, or an update, which cannot be "
            "interrupted, took longer than any before. Let `#SBATCH --signal=USR1@600` ask "
            "earlier, or set `leave_by`.",
            '"is not queued again: it has finished no rollout step": the job is too short for a '
            "step and its checkpoint.",
        ),
        noticed_by="every run",
        action="stop",
        exit_code=ExitCode.TIME_IS_UP,
    ),
    Cause(
        name="signal",
        title="A signal ends the run",
        meaning=(
            "After SIGTERM, SIGUSR1, Ctrl-C, or SIGHUP as its terminal is closed (without `nohup`) "
            "the run stops sampling or waiting at once, or "
            "finishes its update; then it writes a checkpoint and ends. A resumed run repeats a "
            "step that was not finished. The same signal once more ends the run without a "
            "checkpoint. SIGKILL leaves no time: what came after the last checkpoint is lost, and "
            "repeated."
        ),
        advice=(GO_ON,),
        more=(
            "Exit code 137 is SIGKILL. If nobody sent one, the kernel has ended a process for lack "
            "of memory: see `dmesg`, and [out of memory](#out-of-memory).",
        ),
        noticed_by="every run",
        action="stop",
        exit_code=ExitCode.INTERRUPTED,
    ),
    Cause(
        name="rank_lost",
        title="Another process or machine is gone",
        meaning=(
            "A collective operation failed, or was not answered within the timeout of "
            "`trainer.strategy`. The end of the other process's output says why."
        ),
        advice=("Start all processes again with `--ckpt_path auto`.",),
        more=(
            "Ranks above 0 have a log of their own, `run_rank1.log` and so on.",
            "[scale.md](scale.md#when-a-machine-is-lost) lists how, and after how long, each kind "
            "of failure ends a run.",
        ),
        noticed_by="every collective operation",
        action="stop",
        exit_code=ExitCode.RANK_LOST,
    ),
    Cause(
        name="crashed",
        title="The run crashed",
        meaning="The traceback is on the terminal and in `run.log`.",
        advice=(
            "If its last lines point to your code, repair it, and go on with `lit-grpo fit RUN`.",
        ),
        more=("Otherwise it is a bug of lit-grpo or of a library: report it with the traceback.",),
        noticed_by="every command",
        action="stop",
        exit_code=ExitCode.CRASHED,
    ),
)
