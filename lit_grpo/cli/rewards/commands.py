"""Run the commands that try the rewards of a config: rewards, judge-check and rescore.

Each reads the data and loads the policy as a training run would, if it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.rewards.judge_check import check_judges
from lit_grpo.cli.rewards.prompts import trial_prompts
from lit_grpo.cli.rewards.rescore import rescore
from lit_grpo.cli.rewards.trial import try_rewards
from lit_grpo.data import PromptDataModule, TrainingLoader
from lit_grpo.policy.files.loading import max_positions
from lit_grpo.policy.files.vocabulary import check_prompt_tokens, check_special_tokens
from lit_grpo.rewards.scoring.scoring import RewardFailed
from lit_grpo.runs.checkpoints.files import read_checkpoint
from lit_grpo.runs.files.writable import check_writable
from lit_grpo.training import GRPOModule
from lit_grpo.training.checks.compatibility import check_completions_fit, check_prompts_fit
from lit_grpo.training.checks.strategies import refuse_unsupported
from lit_grpo.training.collecting.checked_engine import load_weights, start_engine
from lit_grpo.training.seeds import seed_everything
from lit_grpo.types import Prompt, UserError, check_range


def _run_rewards(cli: CommandLine) -> int:
    """Sample and score the first prompts of the training data, of each source of a mixture."""
    module, num_prompts = grpo_module(cli), cli.config.n
    check_range("n", num_prompts, at_least=1)
    check_writable("run_dir", cli.config.run_dir, Path(cli.config.run_dir))
    loader = read_prompts(cli)
    module.rewards.check_sources(loader.sources)
    # Before the policy is loaded, so errors show at once.
    prompts = loader.some_prompts()
    module.rewards.start(module.reasoning)
    module.rewards.check(prompts)
    _check_model(module, prompts)
    load_policy(cli, module)
    with cli.trainer.precision_plugin.val_step_context():
        return try_rewards(
            module,
            trial_prompts(loader, num_prompts),
            num_rows_per_step=loader.batch_size * module.group_size,
            shares=loader.shares,
            path=Path(cli.config.run_dir) / "rewards.parquet",
        )


def _check_model(module: GRPOModule, prompts: Sequence[Prompt]) -> None:
    """Check that the model has room for prompts and completions, without its weights."""
    outline: Any = module.policy.outline()
    positions = max_positions(outline.config)
    check_completions_fit(positions, module.sampling)
    check_prompts_fit(positions, module.sampling, prompts)
    check_special_tokens(outline.config, module.tokenizer)
    check_prompt_tokens(outline.config, prompts)


def _run_judge_check(cli: CommandLine) -> int:
    """Ask the judges of all rewards."""
    module = grpo_module(cli)
    rewards = [*module.rewards.rewards, *module.evaluation.suite.rewards]
    return check_judges(rewards, lambda: read_prompts(cli).some_prompts())


def _run_rescore(cli: CommandLine) -> int:
    """Score the logged completions of a run again."""
    module, last = grpo_module(cli), cli.config.last
    check_range("last", last, at_least=1)
    check_writable("run_dir", cli.config.run_dir, Path(cli.config.run_dir))
    return rescore(
        module,
        Path(cli.config.run_dir),
        lambda ids: find_prompts(cli, ids),
        last=last,
        name=cli.config_name.removeprefix("config").lstrip("-") or "rescored",
    )


RUNNERS: dict[str, Callable[[CommandLine], int]] = {
    "rewards": _run_rewards,
    "judge-check": _run_judge_check,
    "rescore": _run_rescore,
}


def run_reward_command(cli: CommandLine) -> int:
    """Run one of the commands and return its exit code.

    Raises:
        UserError: the config, the data or a service is wrong.
    """
    try:
        return RUNNERS[cli.command](cli)
    except RewardFailed as error:
        raise UserError(str(error)) from error


def grpo_module(cli: CommandLine) -> GRPOModule:
    """Return the module of a config; raise UserError if it has no rewards."""
    if not isinstance(cli.model, GRPOModule):
        raise UserError(
            f"{cli.command} needs rewards, and the model of this config, "
            f"{type(cli.model).__name__}, has none. Use the config of a GRPO run."
        )
    return cli.model


def read_prompts(cli: CommandLine) -> TrainingLoader:
    """Return the loader of the training prompts, set up as in a training run."""
    data = _prepare_data(cli)
    data.setup("fit")
    loader: TrainingLoader = data.train_dataloader()
    return loader


def find_prompts(cli: CommandLine, ids: Collection[str]) -> dict[str, Prompt]:
    """Return the training prompts with these ids, for a command that takes no steps."""
    data = _prepare_data(cli)
    if isinstance(data, PromptDataModule):
        return data.find("train", ids)
    return read_prompts(cli).find(ids)


def _prepare_data(cli: CommandLine) -> L.LightningDataModule:
    cli.trainer.strategy.connect(cli.model)  # the data reads the tokenizer of the model
    cli.datamodule.trainer = cli.trainer
    cli.datamodule.prepare_data()
    data: L.LightningDataModule = cli.datamodule
    return data


def load_policy(cli: CommandLine, module: GRPOModule) -> None:
    """Load the initial policy, or a checkpoint's, and start the engine with it."""
    refuse_unsupported(cli.trainer)
    strategy = cli.trainer.strategy
    strategy.setup_environment()
    seed_everything(module.seed)
    module.policy.load(with_reference=False)
    if cli.config.ckpt_path is not None:
        checkpoint = read_checkpoint(Path(cli.config.ckpt_path), with_optimizers=False)
        module.on_load_checkpoint(checkpoint)
        # Not strict: a moving reference, which is not loaded here, may be in it.
        module.load_state_dict(checkpoint["state_dict"], strict=False)
    strategy.model_to_device()
    start_engine(module.engine, module.policy)
    load_weights(module.engine, module.policy, 0)
