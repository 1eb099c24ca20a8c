"""Turn the objects of a command line into a ``Setup``: what the cost of a step depends on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.cli.estimate.devices import Cluster
from lit_grpo.cli.estimate.model_sizes import weight_bytes
from lit_grpo.cli.estimate.scorers import scorer_bytes
from lit_grpo.cli.estimate.setup import BFLOAT16, FLOAT32, Sampler, Setup, make_setup
from lit_grpo.cli.estimate.step import make_step
from lit_grpo.policy import LocalTeacher
from lit_grpo.policy.files.loading import outline_model
from lit_grpo.rewards import FormatReward, LengthReward, MathReward
from lit_grpo.rollout import HFEngine, VLLMEngine
from lit_grpo.rollout.server.api import Launch
from lit_grpo.rollout.server.engine import ServedEngine
from lit_grpo.training import GRPOModule

SERVER_FRACTION = 0.9
"""Share of a GPU that a server takes if launch.memory_fraction is null."""
RULES = (MathReward, FormatReward, LengthReward)
"""Rewards whose time is known."""
BYTES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": BFLOAT16}


def setup_of(
    run: BuiltRun,
    cluster: Cluster,
    *,
    strategy: Any,
    precision: Any,
    gpus: Collection[str] = ("0",),
    optimizer_bytes: float | None = None,
    mean_completion_tokens: float | None = None,
) -> Setup:
    """Return the setup of a run on a cluster.

    Args:
        gpus: Numbers of the trainer's GPUs, to tell whether a server takes a share of one.
        optimizer_bytes: As in `make_setup`.
        mean_completion_tokens: As in `make_step`.

    Raises:
        NotChecked: the model cannot be read.
        UserError: as in `make_setup`.
    """
    module, grpo = run.module, run.grpo
    outline = run.outline.get()
    teacher_bytes, teacher_parameters = _teacher(grpo)
    is_bf16 = str(precision).startswith("bf16")
    step = make_step(run, cluster.num_ranks, mean_completion_tokens)
    scorers = scorer_bytes(run.rewards, step.row_tokens, gpus if cluster.is_gpu else None)
    return make_setup(
        outline,
        module.build_optimizer,
        step,
        cluster,
        strategy=strategy,
        precision=precision,
        optimizer_bytes=optimizer_bytes,
        with_reference=module.needs_reference,
        refreshes_reference=module.refreshes_reference,
        checkpointing=module.policy.gradient_checkpointing,
        sampler=_sampler(run, gpus, is_bf16=is_bf16) if grpo else Sampler(kind="none"),
        teacher_bytes=teacher_bytes,
        teacher_parameters=teacher_parameters,
        scorer_bytes=scorers[0],
        scorer_pass_bytes=scorers[1],
        reference_passes=int(grpo is not None and grpo.objective.kl.coef > 0),
        old_passes=_old_passes(grpo) if grpo else 0,
        merges=module.policy.lora is not None and module.policy.merge_lora,
        temperature=module.sampling.temperature,
        compiles=module.policy.compile_forward,
    )


def _old_passes(module: GRPOModule) -> int:
    """Return the forward passes for the logprobs before the update, as in `BatchBuilder`."""
    objective = module.objective
    selects = objective.top_entropy_fraction < 1 or objective.covariance is not None
    is_compared = module.update.optimizer_steps > 1 and objective.old_logprobs == "policy"
    return int(selects or is_compared or (objective.kl.coef > 0 and objective.kl.is_in_reward))


def count_scores(run: BuiltRun, num_rows: int) -> int | None:
    """Return the scores of a step on a rank; None if a reward does more than follow rules."""
    if run.grpo is None:
        return 0
    rewards = run.grpo.rewards.rewards
    by_rules = all(isinstance(one, RULES) for one in rewards)
    return len(rewards) * num_rows if by_rules else None


def _teacher(module: GRPOModule | None) -> tuple[int, int]:
    """Return the bytes and the parameters of a teacher in the trainer's memory."""
    teacher = module.teacher if module else None
    if not isinstance(teacher, LocalTeacher):
        return 0, 0
    outline = outline_model(
        teacher.path,
        dtype=teacher.dtype,
        attn_implementation=None,
        trust_remote_code=teacher.trust_remote_code,
        key="model.teacher.path",
    )
    return weight_bytes(outline), sum(one.numel() for one in outline.parameters())


def _sampler(run: BuiltRun, gpus: Collection[str], *, is_bf16: bool) -> Sampler:
    """Return how the engine samples."""
    module, engine = run.module, run.module.engine
    default = BFLOAT16 if is_bf16 else BYTES[module.policy.dtype]
    sorts = module.sampling.top_p < 1
    if isinstance(engine, HFEngine):
        return Sampler(max_concurrent=engine.max_concurrent, value_bytes=default, sorts=sorts)
    has_adapter = module.policy.lora is not None and module.policy.lora.modules_to_save is None
    if isinstance(engine, VLLMEngine):
        return Sampler(
            kind="vllm",
            max_concurrent=256,
            value_bytes=BYTES.get(engine.dtype or "", default),
            memory_fraction=engine.memory_fraction,
            sleeps=engine.sleep,
            sends_adapter=has_adapter and engine.weight_sync != "full",
        )
    if isinstance(engine, ServedEngine):
        return _served(engine, gpus, default, has_adapter=has_adapter)
    return Sampler(kind="servers", value_bytes=default)


def _served(
    engine: ServedEngine, gpus: Collection[str], default: int, *, has_adapter: bool
) -> Sampler:
    launch = engine.launch
    transfer = "nccl" if getattr(engine, "weight_transfer", "disk") == "nccl" else "disk"
    shared: dict[str, Any] = {
        "kind": "servers",
        "max_concurrent": engine.limits.max_concurrency,
        "sends_adapter": has_adapter and engine.weight_sync != "full",
        "transfer": transfer,
    }
    if launch is None:  # one GPU for each server: nothing else is known of them
        return Sampler(value_bytes=default, num_gpus=len(engine.urls or [""]), **shared)
    copies = launch.num_servers * launch.data_parallel_size
    return Sampler(
        value_bytes=BYTES.get(launch.dtype or "", default),
        num_gpus=copies * launch.tensor_parallel_size,
        gpus_per_copy=launch.tensor_parallel_size,
        memory_fraction=_fraction(launch) if _is_shared(launch, gpus) else 0.0,
        **shared,
    )


def _is_shared(launch: Launch, gpus: Collection[str]) -> bool:
    """Return whether a launched server may run on one of the trainer's GPUs."""
    used = None if launch.devices is None else ",".join(launch.devices).split(",")
    return used is None or not set(used).isdisjoint(gpus)


def _fraction(launch: Launch) -> float:
    return SERVER_FRACTION if launch.memory_fraction is None else launch.memory_fraction
