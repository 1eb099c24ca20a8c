"""The parts of the check by name, each of which runs in a process of its own."""

from __future__ import annotations

import gc
import platform
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from _gpu_check.aims import check_aims
from _gpu_check.device import Device
from _gpu_check.equality import check_equality, precision_context
from _gpu_check.findings import Recorder
from _gpu_check.profile import Waits, profiled
from _gpu_check.runner import ROOT
from _gpu_check.sizes import CheckSize
from _gpu_check.steps import (
    NUM_STEPS,
    NUM_WARM_UP,
    RESERVE_SECONDS,
    Observer,
    judge,
    record_figures,
    train,
)
from _gpu_check.variants import check_variants

ATTENTION_TESTS = "tests/policy/packed/test_merged_attention.py"
LIBRARIES = ("torch", "triton", "transformers", "peft", "lightning", "trl", "vllm")


def machine(recorder: Recorder, device: Device, size: CheckSize) -> None:
    """Describe machine and libraries, and measure what a large matrix product reaches."""
    rows = [("python", platform.python_version()), ("device", device.title)]
    for name in LIBRARIES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    if device.name == "cuda":
        properties = torch.cuda.get_device_properties(device.device)
        rows += [
            ("memory", f"{properties.total_memory / 2**30:.1f} GiB"),
            ("CUDA", str(torch.version.cuda)),
            ("compute capability", f"{properties.major}.{properties.minor}"),
        ]
    recorder.table("machine", ["", ""], rows)
    with recorder.attempt("float32 is not computed in TF32"):
        precision = torch.get_float32_matmul_precision()
        recorder.state("float32 is not computed in TF32", precision == "highest", precision)
    with recorder.attempt("matrix product"):
        side = 8192 if device.name == "cuda" else 256
        tflops = matrix_product_tflops(device, side)
        how = f"two bfloat16 matrices of {side} x {side}, median of 10"
        recorder.figure("matrix product", tflops, "TFLOP/s", how)


def matrix_product_tflops(device: Device, side: int) -> float:
    one = torch.randn(side, side).to(device.device, torch.bfloat16)
    return 2 * side**3 / device.median_seconds(lambda: one @ one, 10, num_warm_up=3) / 1e12


def tests(recorder: Recorder, device: Device, size: CheckSize) -> None:
    """Run the trainings of the device tests; without a GPU, on the stand-in for one.

    The tests of merged attention, most of which need a GPU's operators, run by pytest.
    """
    if find_spec("pytest") is None:
        recorder.skip("device tests", "the tests' helpers need pytest, which is not installed.")
        return
    from device_trainings import check_device

    check_device(recorder, Device("cuda" if device.name == "cuda" else "pretend"))
    run_tests(recorder, ATTENTION_TESTS)


def run_tests(recorder: Recorder, path: str) -> None:
    """Run a test file by pytest, and record its summary with the names of tests that failed."""
    with recorder.attempt(path):
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", path]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if missing := re.search(r"No module named '([^']+)'", result.stdout):
            recorder.skip(path, f"{missing[1]} is not installed.")
            return
        *_, summary = "", *(result.stdout + result.stderr).splitlines()
        failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
        recorder.state(path, result.returncode == 0, "; ".join([*failed, summary]))


def steps(recorder: Recorder, device: Device, size: CheckSize) -> None:
    """Make the steps of a small model, and of a larger one if the time allows."""
    small_steps(recorder, device, size)
    gc.collect()  # what the small model has on the device
    check_aims(recorder, device, size)


def small_steps(recorder: Recorder, device: Device, size: CheckSize) -> None:
    """Make the steps, one more with its waits counted, and one with its update profiled."""
    waits = Waits(device)

    def profile_update(stage: str) -> Any:
        return profiled(recorder, device, "update") if stage == "update" else nullcontext()

    contexts = {NUM_STEPS: waits.stage, NUM_STEPS + 1: profile_update}
    has_time = [True]

    def may_go_on() -> bool:
        has_time[0] = recorder.seconds_left > RESERVE_SECONDS or len(observer.steps) >= NUM_STEPS
        if len(observer.steps) == NUM_STEPS:  # before the measurements, which may fail
            record()
        if len(observer.steps) == NUM_STEPS + 1:
            waits.record(recorder)
        return has_time[0]

    def record() -> None:
        with recorder.attempt("steps"):
            made = observer.steps[:NUM_STEPS]
            judge(recorder, made, has_stopped_early=not has_time[0])
            record_figures(recorder, made[NUM_WARM_UP:] or made, device, size)

    observer = Observer(device, contexts, may_go_on)
    with recorder.attempt("training"):
        module = train(device, size, observer, NUM_STEPS + len(contexts))
        if len(observer.steps) < NUM_STEPS:
            record()
        packs = module.policy.body_and_head.uses_packing
        recorder.state("the model that was loaded on the device runs packed", packs)
        with recorder.attempt("generation, profiled"):
            profile_generation(recorder, device, size, module.policy)


def profile_generation(recorder: Recorder, device: Device, size: CheckSize, policy: Any) -> None:
    from lit_grpo.rollout import HFEngine, Sampling

    num_tokens, workload = 4, size.workload
    policy.to(device.device)
    engine = HFEngine()
    engine.load_weights(policy, 0)
    sampling, prompts = Sampling(max_tokens=num_tokens), size.prompts(workload.num_prompts)
    title = f"generation of {num_tokens} tokens a row"
    with precision_context(device.precision, device), profiled(recorder, device, title):
        list(engine.generate(prompts, workload.group_size, sampling, seed=0))


def against_trl(recorder: Recorder, device: Device, size: CheckSize) -> None:
    """Time steps beside TRL and a bare update, with the benchmark's processes and workloads."""
    needed = ("trl", "datasets", "jsonargparse", "omegaconf", "pyarrow", "matplotlib", "plotly")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        recorder.skip("beside TRL", f"{', '.join(missing)} not installed.")
        return
    if device.name == "pretend":
        recorder.skip("beside TRL", "its processes do not know this device.")
        return
    from _gpu_check.comparison import compare

    compare(recorder, is_tiny=device.name != "cuda")


RUN = {
    "machine": machine,
    "tests": tests,
    "equality": check_equality,
    "steps": steps,
    "variants": check_variants,
    "trl": against_trl,
}
