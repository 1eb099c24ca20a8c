"""Train on the CPU and on another device, and compare what came of it.

As a program, it does so with the pretend device and prints the results as JSON. It has to be a
program of its own: torch makes room for the devices that it knows at the first backward pass of a
process. The GPU check does it with a GPU; it needs no package that a training run does not need.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import flash_on_cpu
import torch
import yaml
from loss_batches import counts_of, random_case
from paths import ROOT
from small_runs import PROMPTS, Keep, Recorded, Replayed, make_module, make_trainer, weights
from tiny import perturbed, prompt, tiny_policy

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.objective import DistillationTerm, EntropyTerm, KLTerm, Objective
from lit_grpo.objective.loss import token_losses
from lit_grpo.policy import LoRA, logprobs
from lit_grpo.policy.packed import packed_attention
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.rollout.hf import running_batch
from lit_grpo.training import Evaluation, GRPOModule, MasterAdamW
from lit_grpo.training.seeds import seed_everything
from lit_grpo.types import Prompt

sys.path.append(str(ROOT / "scripts"))
from _gpu_check.device import Device  # noqa: E402
from _gpu_check.findings import Recorder  # noqa: E402

TEACHER = TemporaryDirectory()
perturbed(tiny_policy(seed=1)).save_pretrained(TEACHER.name)


def distil(**term: Any) -> dict[str, Any]:
    objective = Objective(surrogate="none", distillation=DistillationTerm(coef=1.0, **term))
    return {"objective": objective, "teacher": TEACHER.name}


KL = Objective(kl=KLTerm(coef=0.1, refresh_every=1))
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"policy": {"lora": LoRA(rank=4)}},
    "reference": {"objective": KL, "policy": {"gradient_checkpointing": True}},
    "reference adapter": {"objective": KL, "policy": {"lora": LoRA(rank=4)}},
    "KL in the reward": {"objective": Objective(kl=KLTerm(coef=0.1, place="reward"))},
    "updates": {"update": {"epochs": 2, "minibatches": 2}},
    "entropy": {"objective": Objective(top_entropy_fraction=0.5, entropy=EntropyTerm(coef=0.1))},
    "teacher": distil(),
    "top tokens of a teacher": distil(top_k=8),
    "padded": {"policy": {"packing": False}},
}
BFLOAT16: dict[str, Any] = {
    "policy": {"dtype": "bfloat16"},
    "optimizer": partial(MasterAdamW, lr=1.0, eps=10.0, weight_decay=0.0),
}
"""A run that a GPU rounds otherwise than the CPU."""
MAX_STEPS = 3
PRESETS = files("lit_grpo.configs") / "presets"


class CountMicroBatches(Keep):
    count = 0

    def on_stage_end(self, trainer, pl_module, stage):
        self.count += stage.micro_batch is not None


CPU = Device("cpu")


def train(settings, device: Device, *callbacks, max_steps=MAX_STEPS, **fit) -> GRPOModule:
    module = make_module(**settings)
    if device.name == "cuda":  # its own random numbers would make other weights
        seed_everything(module.seed)
        module.policy.load(
            with_reference=module.needs_reference, refreshes_reference=module.refreshes_reference
        )
    trainer = make_trainer(*callbacks, max_steps=max_steps, **device.trainer_options)
    trainer.fit(module, PromptLoader(PROMPTS, 4), weights_only=True, **fit)
    return module


def difference(module: GRPOModule, other: GRPOModule) -> float:
    pairs = zip(weights(module).values(), weights(other).values(), strict=True)
    return max(float((one - another).abs().max()) for one, another in pairs)


def compare(
    settings: Mapping[str, Any], device: Device, *, replays: bool = False
) -> dict[str, Any]:
    """Train on both devices.

    Args:
        replays: The CPU trains on the completions that the device has sampled.
    """
    keep, recorded = Keep(), Recorded()
    with device.usable():
        module = train(settings | {"engine": recorded}, device, keep)
    engine = Replayed(recorded) if replays else HFEngine()
    expected = train(settings | {"engine": engine}, CPU)
    start = make_module(policy=settings.get("policy"))
    start.configure_model()
    metrics = [output["metrics"] for output in keep.outputs]
    return {
        "difference": difference(module, expected),
        "learned": difference(module, start),
        "sampler_difference": max(one["sampler/logprob_difference_max"] for one in metrics),
        "uses_packing": module.policy.body_and_head.uses_packing,
    }


def compare_merged(device: Device) -> dict[str, Any]:
    """Train on the pretend device with merged attention, which the CPU does not use."""
    flash_on_cpu.install()
    is_on_device = {"pretend": True, "cpu": False}
    with patch.object(
        packed_attention, "_can_merge", lambda query, *_: is_on_device[query.device.type]
    ):
        return compare(RUNS["reference"], device)


def compare_parts(device: Device) -> dict[str, Any]:
    """Train with prompts that are read one at a time, and a head that runs in chunks."""
    run_head = logprobs._run_head

    def run_in_chunks(function: Any, model: Any, tokens: Any, size: int, states: Any) -> Any:
        return run_head(function, model, tokens, min(4, size), states)

    with (
        patch.object(running_batch, "PREFILL_TOKENS", 1),
        patch.object(logprobs, "_run_head", run_in_chunks),
    ):
        return compare(RUNS["entropy"], device)


def difference_after_a_resume(device: Device) -> float:
    from lit_grpo.callbacks import Checkpoints  # needs pyarrow

    with device.usable(), TemporaryDirectory() as directory:
        expected = train({}, device)
        train({}, device, Checkpoints(dirpath=str(directory)), max_steps=2)
        return difference(train({}, device, ckpt_path=Path(directory) / "last.ckpt"), expected)


def built(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with these values, and with dataclasses for the mappings among them."""
    hints = get_type_hints(kind)
    made = {}
    for name, value in values.items():
        kinds = [one for one in (hints[name], *get_args(hints[name])) if is_dataclass(one)]
        made[name] = built(kinds[0], value) if isinstance(value, dict) else value
    return kind(**made)


def objective_of(preset: Traversable) -> Objective:
    objective: Objective = built(
        Objective, yaml.safe_load(preset.read_text())["model"]["objective"]
    )
    return objective


def loss_of(objective: Objective, device: torch.device) -> list[float]:
    """Return loss and gradient of a random micro-batch on a device."""
    case = random_case(1)
    chosen = {
        "covariance_mask": case.batch.loss_mask,
        "is_good": case.batch.advantages > 0,
        "teacher_logprobs": case.logprobs - 0.3,
    }
    batch, counts = replace(case.batch, **chosen), counts_of(case.batch)
    logprobs = case.logprobs.to(device).requires_grad_()
    entropy = case.entropy.to(device, logprobs.dtype)
    losses = token_losses(logprobs, entropy, batch.to(device), counts, objective, entropy_coef=0.1)
    losses.loss.backward()
    gradient = logprobs.grad
    assert gradient is not None
    return [losses.loss.item(), *gradient.cpu().flatten().tolist()]


def loss_difference(preset: Traversable, device: Device) -> float:
    """Return how much the loss of a preset and its gradient differ between the devices."""
    objective = objective_of(preset)
    with device.usable():
        on_device = loss_of(objective, device.device)
    return max(abs(a - b) for a, b in zip(on_device, loss_of(objective, CPU.device), strict=True))


def evaluate(device: Device, **options: Any) -> dict[str, float]:
    module = make_module(evaluation=Evaluation(num_samples=2))
    with device.usable():
        trainer = make_trainer(**device.trainer_options, **options)
        (metrics,) = trainer.validate(module, PromptLoader(PROMPTS, 4, training=False))
    return metrics


def waits_with(max_tokens: int, device: Device) -> dict[str, Any]:
    """Return the number of micro-batches of a run, and where the host waited how often."""
    update = {"minibatches": 2, "max_tokens_per_micro_batch": max_tokens}
    counter = CountMicroBatches()
    with device.usable(), device.counted_waits() as waits:
        train({"update": update, "objective": KL}, device, counter)
        return {"micro_batches": counter.count, "waits": dict(waits)}


def waits_of_sampling(prompts: list[Prompt], sampling: Sampling, device: Device) -> int:
    """Return how often the host waits while it samples completions of some prompts."""
    policy, engine = tiny_policy(), HFEngine()
    with device.usable():
        engine.load_weights(policy.to(device.device), 0)
        with device.counted_waits() as waits:
            completions = engine.generate(prompts, 4, sampling, seed=0)
            lengths = [len(completion.token_ids) for _, completion in completions]
            assert max(lengths) == sampling.max_tokens
            return waits.total()


def sampling_waits(device: Device) -> dict[str, int]:
    """Return the waits of completions that are of full length, and of some that end earlier.

    Prompts are of one length, or of two.
    """
    alike, unlike = [PROMPTS[0]] * 2, [prompt("7+8=", id="short"), prompt("70+180=", id="long")]
    stops = tuple(range(20))
    samplings = {
        "8 tokens": (alike, Sampling(max_tokens=8)),
        "24 tokens": (alike, Sampling(max_tokens=24)),
        "24 tokens, rows end": (alike, Sampling(max_tokens=24, stop_token_ids=stops)),
        "24 tokens, stop strings": (
            alike,
            Sampling(max_tokens=24, stop=("q",), min_tokens=2, top_p=0.9),
        ),
        "8 tokens, unlike prompts": (unlike, Sampling(max_tokens=8)),
        "24 tokens, unlike prompts": (unlike, Sampling(max_tokens=24)),
    }
    return {name: waits_of_sampling(*arguments, device) for name, arguments in samplings.items()}


def check_device(recorder: Recorder, device: Device) -> None:
    """Compare everything with the CPU, and record what differs by more than rounding."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at the first product of matrices
    for name in RUNS:
        with recorder.attempt(f"training on {device.name}: {name}"):
            _check_run(recorder, device, name)
    with recorder.attempt("losses of the presets"):
        worst = max(loss_difference(preset, device) for preset in PRESETS.iterdir())
        why = "float32 losses and gradients of a few tokens, of about 1."
        recorder.decide(f"losses of the presets on {device.name}", worst, 1e-5, why)
    with recorder.attempt("a resumed training"):
        if find_spec("pyarrow") is None:
            recorder.skip("a resumed training", "its checkpoints need pyarrow.")
        else:
            _check_resume(recorder, device)
    with recorder.attempt("an evaluation"):
        # The pretend device cannot index in inference mode as older versions of transformers do.
        metrics = evaluate(device, inference_mode=device.name == "cuda")
        recorder.state(f"an evaluation on {device.name}", "val/accuracy" in metrics)
    with recorder.attempt("waits"):
        _check_waits(recorder, device)


def _check_run(recorder: Recorder, device: Device, name: str) -> None:
    found = compare(RUNS[name], device, replays=True)
    title, why = f"training on {device.name}: {name}", f"learned {found['learned']:.2g}"
    recorder.decide(
        f"{title}, difference from the CPU relative to what is learned",
        found["difference"] / found["learned"],
        1e-3,
        f"rounding of float32 grows to 1e-5 in {MAX_STEPS} steps; {why}.",
    )
    recorder.decide(
        f"{title}, sampler against trainer",
        found["sampler_difference"],
        1e-4,
        "float32 logprobs of the same tokens, with a cache and in packs.",
    )


def _check_resume(recorder: Recorder, device: Device) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        apart = difference_after_a_resume(device)
    finally:
        torch.use_deterministic_algorithms(False)
    why = "0 with deterministic kernels; the cumulative sum of a GPU has none."
    recorder.decide(f"a resumed training on {device.name}", apart, 1e-5, why)


def _check_waits(recorder: Recorder, device: Device) -> None:
    few, many = (waits_with(tokens, device) for tokens in (10_000, 1))
    counts = [
        sum(n for place, n in one["waits"].items() if not place.startswith("rollout/"))
        for one in (few, many)
    ]
    recorder.state(
        f"the host waits for no micro-batch on {device.name}",
        counts[0] == counts[1],
        f"{counts[0]} waits with {few['micro_batches']} micro-batches, {counts[1]} with "
        f"{many['micro_batches']}: {many['waits']}",
    )
    waits = sampling_waits(device)
    for prompts in ("", ", unlike prompts"):
        recorder.state(
            f"the host waits once a sampled token on {device.name}{prompts}",
            waits[f"24 tokens{prompts}"] - waits[f"8 tokens{prompts}"] == 16,
            str(waits),
        )


def main() -> None:
    device = Device("pretend")
    results = {
        "runs": {name: compare(settings, device) for name, settings in RUNS.items()}
        | {"merged": compare_merged(device), "parts": compare_parts(device)},
        "bfloat16": compare(BFLOAT16, device, replays=True),
        "replayed": compare(RUNS["plain"], device, replays=True),
        "presets": {preset.name: loss_difference(preset, device) for preset in PRESETS.iterdir()},
        "difference_after_a_resume": difference_after_a_resume(device),
        "metrics": [evaluate(one) for one in (CPU, device)],
        "few_micro_batches": waits_with(10_000, device),
        "many_micro_batches": waits_with(1, device),
        "sampling_waits": sampling_waits(device),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
