"""The commands that try rewards out: what each of them needs of a parsed config.

They read the data and load the policy as a training would; none trains or starts a run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.cli.judge_check import check_judges
from lit_grpo.cli.rescore import rescore
from lit_grpo.cli.reward_trial import try_rewards
from lit_grpo.rewards.scoring import RewardFailed
from lit_grpo.training import GRPOModule
from lit_grpo.training.base import refuse_untested
from lit_grpo.training.seeds import seed_everything
from lit_grpo.types import UserError

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser

    from lit_grpo.cli.app import CommandLine

OPTIONS: dict[str, dict[str, Any]] = {
    "rewards": {
        "--n": {"type": int, "default": 8, "help": "Prompts, the first of the training order."}
    },
    "rescore": {
        "--last": {"type": int | None, "help": "Rollout steps, the last of the run; null for all."}
    },
}
"""What a command takes beside the keys of a config."""


def add_options(parser: LightningArgumentParser, command: str) -> None:
    for name, settings in OPTIONS.get(command, {}).items():
        parser.add_argument(name, **settings)


def one_device(trainer: Any) -> dict[str, Any]:
    """The first of the devices that a trainer's config names, alone."""
    devices = trainer.devices
    return {
        "devices": devices[:1] if isinstance(devices, list) else 1,
        "num_nodes": 1,
        "strategy": "auto",
    }


def with_run(arguments: Sequence[str]) -> list[str]:
    """``RUN …`` as the config of that run, which what follows overrides.

    Raises:
        ValueError: no run is named, or it has no config.
    """
    run_dir, *others = arguments or ["-"]
    if run_dir in ("-h", "--help"):
        return [run_dir]
    if run_dir.startswith("-"):
        raise UserError("rescore needs the directory of a run first: lit-grpo rescore runs/my/0")
    config = Path(run_dir) / "config.yaml"
    if not config.is_file():
        raise UserError(f"{run_dir}: no such run directory (it has no config.yaml).")
    return ["--config", str(config), *others, "--run_dir", run_dir]


def measure_rewards(cli: CommandLine) -> int:
    module, num_prompts = _grpo_module(cli), _at_least_one("n", cli.config.n)
    prompts = _read_prompts(cli)
    module.rewards.start()  # what refuses to start or to score the data does so at once
    module.rewards.check(prompts.prompts)
    _load_policy(cli, module)
    with cli.trainer.precision_plugin.val_step_context():
        try_rewards(
            module,
            list(islice(chain.from_iterable(prompts), num_prompts)),
            num_rows_a_step=prompts.batch_size * module.group_size,
            path=Path(cli.config.run_dir) / "rewards.parquet",
        )
    return 0


def measure_judges(cli: CommandLine) -> int:
    module = _grpo_module(cli)
    rewards = [*module.rewards.rewards, *module.evaluation.suite.rewards]
    return check_judges(rewards, lambda: _read_prompts(cli).prompts)


def measure_again(cli: CommandLine) -> int:
    module = _grpo_module(cli)
    last = cli.config.last
    rescore(
        module.rewards,
        Path(cli.config.run_dir),
        lambda: _read_prompts(cli).prompts,
        group_size=module.group_size,
        last=None if last is None else _at_least_one("last", last),
        name=cli.config_name.removeprefix("config").lstrip("-") or "rescored",
    )
    return 0


MEASURES: dict[str, Callable[[CommandLine], int]] = {
    "rewards": measure_rewards,
    "judge-check": measure_judges,
    "rescore": measure_again,
}


def measure(cli: CommandLine) -> int:
    """Runs a command of ``MEASURES`` and returns its exit code.

    Raises:
        ValueError: what the user can put right.
    """
    try:
        return MEASURES[cli.command](cli)
    except RewardFailed as error:
        raise UserError(str(error)) from error


def _grpo_module(cli: CommandLine) -> GRPOModule:
    if not isinstance(cli.model, GRPOModule):
        raise UserError(
            f"{cli.command} needs rewards, and the model of this config, "
            f"{type(cli.model).__name__}, has none. Give the config of a GRPO training."
        )
    return cli.model


def _at_least_one(name: str, number: int) -> int:
    if number < 1:
        raise UserError(f"{name} must be >= 1, got {number} (nothing would be measured).")
    return number


def _read_prompts(cli: CommandLine) -> Any:
    """The loader of the training prompts, as a training would read them."""
    trainer, data = cli.trainer, cli.datamodule
    trainer.strategy.connect(cli.model)  # whose tokenizer the data asks for
    data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    return data.train_dataloader()


def _load_policy(cli: CommandLine, module: GRPOModule) -> None:
    """The policy on its device, as it stands at the start of a run or in a checkpoint."""
    refuse_untested(cli.trainer)
    strategy = cli.trainer.strategy
    strategy.setup_environment()
    seed_everything(module.seed)
    module.policy.load(with_reference=False)
    if cli.config.ckpt_path is not None:
        checkpoint = strategy.load_checkpoint(cli.config.ckpt_path, weights_only=True)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    strategy.model_to_device()
    module.engine.start(module.policy)
    module.engine.load_weights(module.policy, 0)
