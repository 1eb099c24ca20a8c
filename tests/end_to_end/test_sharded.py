"""Two real processes that share a policy's weights end with those that DDP ends with."""

from itertools import product
from pathlib import Path

import pytest
import sharded_cases
import torch
from forked_ranks import Importer
from needs import needs_deepspeed
from sharded_cases import RESUMED
from sharded_results import (
    ON_DEVICE,
    assert_as_under_ddp,
    assert_is_sharded,
    difference,
    load,
)
from tiny import LLAMA
from transformers import AutoModelForCausalLM

from lit_grpo.policy import Policy
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.runs.checkpoints.files import read_manifest, why_unusable
from lit_grpo.runs.export import load_weights

SECONDS = 1200
"""Within which all trainings of a fixture end, on a machine that does much besides."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]

MIXED = "bf16-mixed"
EQUALITY = [case for case in sharded_cases.CASES if case != MIXED]
OBJECTIVES = [*sharded_cases.OBJECTIVES]
SKIPPING, SFT = [*sharded_cases.SKIPPING], [*sharded_cases.SFT]
EARLIER = ["ddp", "fsdp2"]
OTHER_STRATEGY = [("ddp", "fsdp2"), ("fsdp2", "ddp")]
"""The strategy that goes on, and the earlier one."""
ZERO = ["zero1", "zero2", "zero3"]
SHARDED = ["fsdp2", *(pytest.param(strategy, marks=needs_deepspeed) for strategy in ZERO)]
CASES = [
    pytest.param(case, strategy, marks=[needs_deepspeed] if strategy in ZERO else [])
    for strategy in ("fsdp2", *ZERO)
    for case in [*EQUALITY, *SKIPPING]
]
SETTINGS = ["whole", "kept", "offloaded"]
ZERO_SETTINGS = ["zero1 offloaded", "zero2 offloaded", "zero3 offloaded", "persistent"]
ON_DEVICES = [
    ("reference in the reward, several updates", "fsdp2"),
    ("lora with a moving reference", "fsdp2"),
    ("plain", "offloaded"),
]
ZERO_ON_DEVICES = [
    ("padded, entropy", "zero1"),
    ("reference in the reward, several updates", "zero2"),
    ("lora with a moving reference", "zero3"),
    ("tied, checkpointing", "zero3"),
    ("plain", "zero3 offloaded"),
]
"""Cases that are trained on the pretend device, too, and their strategies."""
OTHER_OPTIMIZERS = ["RMSprop", "AMSGrad"]
"""Which begin with an empty state."""
OTHER_STAGE = [("zero2", "ddp"), ("zero3", "zero2"), ("zero1", "fsdp2"), ("ddp", "zero3")]
"""The strategy that goes on, and the earlier one, with DeepSpeed in between."""
SCALED_ZERO = [*product(RESUMED[:1], ZERO), (RESUMED[1], "zero3")]
"""Cases that go on with another number of ranks in the same stage."""


def run(
    importer: Importer,
    directory: Path,
    num_ranks: int,
    *names: str,
    program: str = "sharded_trainings",
) -> None:
    words = [str(num_ranks), *names]
    importer.run(words, directory, num_ranks=num_ranks, program=program, seconds=SECONDS)


def run_on_devices(importer: Importer, directory: Path, strategy: str, *cases: tuple[str, str]):
    """Run cases on the pretend device, one of which goes on under this strategy."""
    names = [f"{case}/{name}{ON_DEVICE}" for case, name in [*cases, (RESUMED[0], strategy)]]
    names.append(f"{names[-1]}:{strategy}{ON_DEVICE}:5")
    run(importer, directory, 2, *names, program="pretend_trainings")


@pytest.fixture(scope="module")
def trained(importer, tmp_path_factory) -> Path:
    """Return the directory with the results of each case under DDP and FSDP2, and of resumed runs.

    Saving in the background comes last: it is held up.
    """
    directory = tmp_path_factory.mktemp("sharded")
    sharded_cases.write_policies(directory)
    cases = [*EQUALITY, *OBJECTIVES, MIXED, *SKIPPING, *SFT]
    names = [f"{case}/{strategy}" for case in cases for strategy in EARLIER]
    names += [f"plain/{strategy}" for strategy in SETTINGS]
    resumed = [("fsdp2", "fsdp2"), *OTHER_STRATEGY]
    names += [f"{case}/{now}:{earlier}:5" for case in RESUMED for now, earlier in resumed]
    names += [
        f"{RESUMED[1]}/{strategy}:{strategy}:4:{optimizer}"
        for strategy in EARLIER
        for optimizer in OTHER_OPTIMIZERS
    ]
    names += ["own engine/ddp", "own engine/fsdp2", "undeclared engine/fsdp2"]
    names += [
        *("shallow/ddp", "compile/fsdp2", "deep/ddp"),
        *(f"{RESUMED[0]}/{one}" for one in ("background", "fsdp2:background:5")),
    ]
    run(importer, directory, 2, *names)
    return directory


@pytest.fixture(scope="module")
def on_devices(importer, trained) -> Path:
    """Return the same directory after runs under DDP and FSDP2 on the pretend device."""
    run_on_devices(importer, trained, "fsdp2", ("moving reference", "ddp"), *ON_DEVICES)
    return trained


@pytest.fixture(scope="module")
def zero_on_devices(importer, trained) -> Path:
    """Return the same directory after runs under DeepSpeed on the pretend device."""
    run_on_devices(importer, trained, "zero3", *ZERO_ON_DEVICES)
    return trained


@pytest.fixture(scope="module")
def other_numbers(importer, trained) -> Path:
    """Return the same directory after runs that went on with another number of ranks."""
    on_one = ("fsdp2:fsdp2:4", "ddp:fsdp2:4", "one")
    run(importer, trained, 1, *(f"{case}/{training}" for case in RESUMED for training in on_one))
    on_two = ("fsdp2:one:4", "ddp:one:4")
    run(importer, trained, 2, *(f"{case}/{training}" for case in RESUMED for training in on_two))
    return trained


@pytest.fixture(scope="module")
def zero(importer, trained) -> Path:
    """Return the same directory with the results under DeepSpeed."""
    names = [
        f"{case}/{strategy}" for strategy in ZERO for case in (*EQUALITY, MIXED, *SKIPPING, *SFT)
    ]
    names += [f"{case}/zero3" for case in OBJECTIVES]
    names += [f"{case}/{strategy}:{strategy}:5" for case in RESUMED for strategy in ZERO]
    names += [f"{case}/{now}:{earlier}:5" for case in RESUMED for now, earlier in OTHER_STAGE]
    names += [f"{RESUMED[1]}/zero2:zero2:4:{optimizer}" for optimizer in OTHER_OPTIMIZERS]
    names += [f"plain/{settings}" for settings in ZERO_SETTINGS]
    names += [*(f"compile/{strategy}" for strategy in ZERO), "compile deep/zero3"]
    names += [
        "shallow/zero2 only last",
        "own engine/zero3",
        "undeclared engine/zero3",
        "bfloat16/zero2",
    ]
    run(importer, trained, 2, *names)
    return trained


@pytest.fixture(scope="module")
def other_numbers_of_zero(importer, zero) -> Path:
    """Return the same directory after runs that went on with another number of ranks."""
    on_one = [
        f"{case}/{training}"
        for case, stage in SCALED_ZERO
        for training in (f"{stage}:{stage}:4", f"ddp:{stage}:4", f"{stage} one")
    ]
    run(importer, zero, 1, *on_one)
    on_two = [
        f"{case}/{strategy}:{stage} one:4"
        for case, stage in SCALED_ZERO
        for strategy in (stage, "ddp")
    ]
    run(importer, zero, 2, *on_two)
    return zero


@pytest.fixture
def results(strategy, request) -> Path:
    """Return the directory with the results under a strategy."""
    return request.getfixturevalue("zero" if strategy in ZERO else "trained")


@pytest.mark.parametrize(("case", "strategy"), CASES)
def test_a_sharded_policy_takes_the_steps_of_ddp(results, case, strategy):
    """Past DeepSpeed's engine 1e-2 would differ."""
    assert_as_under_ddp(results, case, strategy)


@needs_deepspeed
def test_weights_tell_that_every_micro_batch_is_taken_for_the_last_of_a_step(zero):
    """DeepSpeed drops gradients then; in stage 3 it takes the same steps."""
    for one, other in zip(
        load(zero, "shallow", "ddp"), load(zero, "shallow", "zero2 only last"), strict=True
    ):
        assert difference(one, other) > 1e-3


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
@pytest.mark.parametrize("case", OBJECTIVES)
def test_an_objective_over_ranks_or_models_takes_the_steps_of_ddp(results, case, strategy):
    assert_as_under_ddp(results, case, strategy)


@needs_deepspeed
@pytest.mark.parametrize("strategy", ZERO)
def test_deepspeed_takes_the_steps_of_ddp_under_autocast(zero, strategy):
    """Weights that differ by their last bit may differ by a whole step of bfloat16 once they are
    cast, on some CPUs; so only the first two gradients are alike."""
    ddp, sharded = load(zero, MIXED, "ddp"), load(zero, MIXED, strategy)
    assert_is_sharded(ddp, sharded, strategy)
    for one, other in zip(ddp, sharded, strict=True):
        assert len(one["metrics"]) == len(other["metrics"]) == 5
        norms = [[step["policy/grad_norm"] for step in rank["metrics"]] for rank in (one, other)]
        assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-6)
        assert norms[0][1] == pytest.approx(norms[1][1], rel=1e-3)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_an_engine_of_ones_own_may_sample_unlike_numbers_of_tokens_on_the_ranks(results, strategy):
    ranks = zip(
        load(results, "own engine", "ddp"), load(results, "own engine", strategy), strict=True
    )
    for one, other in ranks:
        assert difference(one, other) < 1e-5
        assert one["num_tokens"] == other["num_tokens"]
    first, second = load(results, "own engine", strategy)
    assert first["num_tokens"][0] != second["num_tokens"][0]


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_an_engine_that_runs_a_divided_policy_must_say_so(results, strategy):
    for rank in load(results, "undeclared engine", strategy):
        assert "StopsEarly.samples_with_policy must be True" in rank["error"]


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_step_without_a_finite_gradient_is_left_out(results, strategy):
    for rank in load(results, "not finite", strategy):
        assert [one["policy/skipped_fraction"] for one in rank["metrics"]] == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("case", SFT)
def test_sft_takes_the_steps_of_ddp(results, case, strategy):
    ranks = zip(load(results, case, "ddp"), load(results, case, strategy), strict=True)
    for one, other in ranks:
        assert difference(one, other) < 1e-5
        assert one["num_skipped"] == other["num_skipped"]
        assert sum(one["num_skipped"]) == (case == "sft not finite")


@pytest.mark.parametrize("strategy", SETTINGS)
def test_the_settings_of_the_strategy_change_no_step(trained, strategy):
    assert_as_under_ddp(trained, "plain", strategy)


def test_a_rank_without_rewards_has_nothing_to_train_on_in_one_step(trained):
    first, second = load(trained, "a rank without rewards", "fsdp2")
    assert 0 in second["num_micro_batches"]
    assert 0 not in first["num_micro_batches"]


def test_under_mixed_precision_the_shards_stay_in_float32(trained):
    first, second = load(trained, MIXED, "fsdp2")
    assert difference(first, second) == 0
    start = load(trained, MIXED, "ddp")[0]
    assert 0 < difference(first, start) < 0.02  # 5 steps of at most 1e-3 each, apart at most twice
    assert all(weight.dtype == torch.float32 for weight in first["weights"].values())


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_compiled_sharded_policy_takes_the_steps_of_ddp(results, strategy):
    assert_as_under_ddp(results, "compile", strategy, ddp_case="shallow")


@pytest.mark.parametrize(("case", "strategy"), ON_DEVICES)
def test_on_a_device_a_sharded_policy_takes_the_steps_of_ddp(on_devices, case, strategy):
    assert_as_under_ddp(on_devices, case, f"{strategy}{ON_DEVICE}")


def test_on_a_device_ddp_takes_the_same_steps(on_devices):
    for strategy in ("ddp", f"ddp{ON_DEVICE}"):
        first, second = load(on_devices, "moving reference", strategy)
        assert difference(first, second) == 0
    assert difference(load(on_devices, "moving reference", "ddp")[0], first) < 1e-5


@needs_deepspeed
@pytest.mark.parametrize(("case", "strategy"), ZERO_ON_DEVICES)
def test_deepspeed_takes_the_steps_of_ddp_on_a_device(zero_on_devices, case, strategy):
    assert_as_under_ddp(zero_on_devices, case, f"{strategy}{ON_DEVICE}")


@pytest.mark.parametrize(
    ("strategy", "directory"),
    [
        ("fsdp2", "on_devices"),
        pytest.param("zero3", "zero_on_devices", marks=needs_deepspeed),
    ],
)
def test_a_resumed_run_ends_bit_identically_on_a_device(request, strategy, directory):
    trained, case, name = request.getfixturevalue(directory), RESUMED[0], f"{strategy}{ON_DEVICE}"
    assert_as_under_ddp(trained, case, name)
    whole, part = load(trained, case, name), load(trained, case, f"{name}:{name}:5")
    for one, other in zip(whole, part, strict=True):
        assert len(other["metrics"]) == 3
        assert difference(one, other) == 0


@needs_deepspeed
def test_layers_are_compiled_one_by_one_and_recomputed_in_stage_3(zero):
    assert_as_under_ddp(zero, "compile deep", "zero3", ddp_case="deep")


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_ends_bit_identically(trained, case):
    whole, part = load(trained, case, "fsdp2"), load(trained, case, "fsdp2:fsdp2:5")
    for one, other in zip(whole, part, strict=True):
        assert difference(one, other) == 0


def test_a_checkpoint_written_in_the_background_is_of_its_step(trained):
    results = load(trained, RESUMED[0], "background")
    for rank in results:
        assert not any(rank["is_written"][:3])
    for earlier, later in zip(
        load(trained, RESUMED[0], "fsdp2"),
        load(trained, RESUMED[0], "fsdp2:background:5"),
        strict=True,
    ):
        assert difference(earlier, later) == 0
    directory = trained / f"{RESUMED[0]}-background"
    assert (directory / "last.ckpt").resolve().name == "step_000005.ckpt"
    for step in (2, 4, 5):
        assert why_unusable(directory / f"step_{step:06d}.ckpt", reads_all=True) == ""
    assert not list(directory.glob("*.partial"))


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize(("strategy", "earlier"), OTHER_STRATEGY)
def test_a_run_goes_on_under_the_other_strategy(trained, case, strategy, earlier):
    whole, part = load(trained, case, earlier)[0], load(trained, case, f"{strategy}:{earlier}:5")[0]
    assert difference(whole, part) < 1e-5


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_goes_on_with_another_number_of_ranks(other_numbers, case):
    """Completions depend on the number of ranks, so DDP goes on from the same checkpoint."""
    for earlier, num_ranks in (("fsdp2", 1), ("one", 2)):
        sharded, whole = (
            load(other_numbers, case, f"{strategy}:{earlier}:4", num_ranks)[0]
            for strategy in ("fsdp2", "ddp")
        )
        assert all(sharded["is_sharded"])
        assert difference(sharded, whole) < 1e-5


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero2", marks=needs_deepspeed)])
@pytest.mark.parametrize("optimizer", OTHER_OPTIMIZERS)
def test_an_optimizer_that_needs_another_state_begins_with_an_empty_one(
    results, strategy, optimizer
):
    whole = load(results, RESUMED[1], f"ddp:ddp:4:{optimizer}")[0]
    sharded = load(results, RESUMED[1], f"{strategy}:{strategy}:4:{optimizer}")[0]
    assert len(sharded["metrics"]) == 2
    assert difference(sharded, whole) < 1e-5


def test_checkpoints_and_final_models_are_whole(trained):
    for case in RESUMED:
        for strategy in EARLIER:
            directory = trained / f"{case}-{strategy}"
            checkpoint = directory / "step_000004.ckpt"
            assert checkpoint.is_dir() == (strategy == "fsdp2")
            assert why_unusable(checkpoint, reads_all=True) == ""
            manifest = read_manifest(checkpoint)
            assert manifest is not None
            assert manifest.is_healthy
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(trained / f"{case}-{strategy}" / "final")
            for strategy in EARLIER
        )
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@needs_deepspeed
@pytest.mark.parametrize("strategy", ZERO_SETTINGS)
def test_the_settings_of_deepspeed_change_no_step(zero, strategy):
    assert_as_under_ddp(zero, "plain", strategy)


@needs_deepspeed
def test_deepspeed_refuses_to_train_bfloat16_weights(zero):
    for rank in load(zero, "bfloat16", "zero2"):
        assert "policy.dtype must be float32 under DeepSpeed" in rank["error"]


@needs_deepspeed
@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("case", RESUMED)
def test_a_run_under_deepspeed_resumes_bit_identically(zero, case, strategy):
    whole, part = load(zero, case, strategy), load(zero, case, f"{strategy}:{strategy}:5")
    for one, other in zip(whole, part, strict=True):
        assert len(other["metrics"]) == 3
        assert difference(one, other) == 0


@needs_deepspeed
@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize(("strategy", "earlier"), OTHER_STAGE)
def test_a_run_goes_on_in_another_stage_of_deepspeed_or_without_it(zero, case, strategy, earlier):
    """Without the moments of the optimizer 2e-3 would differ."""
    whole, part = load(zero, case, earlier)[0], load(zero, case, f"{strategy}:{earlier}:5")[0]
    assert len(part["metrics"]) == 3
    assert difference(whole, part) < 1e-5


@needs_deepspeed
@pytest.mark.parametrize(("case", "stage"), SCALED_ZERO)
def test_a_run_under_deepspeed_goes_on_with_another_number_of_ranks(
    other_numbers_of_zero, case, stage
):
    """As `test_a_run_goes_on_with_another_number_of_ranks`."""
    for earlier, num_ranks in ((stage, 1), (f"{stage} one", 2)):
        sharded, whole = (
            load(other_numbers_of_zero, case, f"{strategy}:{earlier}:4", num_ranks)[0]
            for strategy in (stage, "ddp")
        )
        assert len(sharded["metrics"]) == 2
        assert difference(sharded, whole) < 1e-5


@needs_deepspeed
@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("case", ["plain", "tied, checkpointing", "lora with a reference"])
def test_checkpoints_of_deepspeed_are_whole_and_can_be_exported(zero, case, strategy, monkeypatch):
    directory = zero / f"{case}-{strategy}"
    checkpoint = directory / "last.ckpt"
    assert why_unusable(checkpoint, reads_all=True) == ""
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    assert manifest.is_healthy
    monkeypatch.chdir(zero)  # which has the policies of files
    settings = {"architecture": LLAMA, "packing": False}
    policy = Policy(**(settings | sharded_cases.CASES[case].get("policy", {})))
    policy.load(with_reference=False)
    load_weights(policy, checkpoint)
    trained = load(zero, case, strategy)[0]
    assert difference({"weights": dict(named_weights(policy.model))}, trained) == 0
    final = AutoModelForCausalLM.from_pretrained(directory / "final")
    for name, weight in final.named_parameters():
        assert weight.equal(trained["weights"][name]), name
