"""Names of strategies: which are supported, and why the others are not."""

import re

import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.distributed.supported import supported_strategy
from lit_grpo.types import UserError


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("auto", SingleDeviceStrategy),
        ("ddp", DDPStrategy),
        ("ddp_find_unused_parameters_true", DDPStrategy),
        ("fsdp2", FSDP2Strategy),
        ("deepspeed_stage_3_offload", ZeROStrategy),
    ],
)
def test_a_strategy_is_known_by_its_name_without_being_made(name, kind):
    assert supported_strategy(name) is kind


SUPPORTED = {
    "ddp",
    "ddp_find_unused_parameters_false",
    "ddp_find_unused_parameters_true",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
    "fsdp2",
    "single_device",
}
REFUSED = {
    "dp|xyz": "no strategy has this name; use ddp .* fsdp2",
    "fsdp|fsdp_cpu_offload": "Lightning's FSDP gathers .* use fsdp2",
    "ddp_(spawn|fork|notebook).*": "copies of a process, by spawn or fork, .* use ddp in a script",
    "deepspeed": "Lightning's own DeepSpeed .* use one of these stages, or the class ZeROStrategy",
    "deepspeed_stage_3_offload_nvme": "where the disk is; use deepspeed_stage_3_offload, .* ZeRO",
    "xla|xla_debug|single_xla|single_tpu": "for TPUs, .* use auto with a GPU or a CPU",
}
"""Names -> why they are refused, and what to set."""


@pytest.mark.parametrize("name", sorted({*StrategyRegistry, "dp", "xyz"} - SUPPORTED))
def test_a_name_is_refused_with_the_reason_of_its_kind_and_what_to_use(name):
    (why,) = [why for names, why in REFUSED.items() if re.fullmatch(names, name)]
    with pytest.raises(UserError, match=rf"got {name} \(.*{why}.*\)\. Set trainer.strategy\.$"):
        supported_strategy(name)


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_a_name_that_is_supported_stays_one(name):
    supported_strategy(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("FSDP2Strategy", "a class needs class_path: lit_grpo.distributed.fsdp2.FSDP2Strategy;"),
        ("lit_grpo.distributed.deepspeed.ZeROStrategy", r"in Python, pass ZeROStrategy\("),
        ("ModelParallelStrategy", "tensor parallelism of the trainer is not supported"),
        ("lightning.pytorch.strategies.FSDPStrategy", "use fsdp2, which divides the same"),
    ],
)
def test_the_name_of_a_class_is_told_how_to_give_it_or_why_it_is_refused(name, why):
    with pytest.raises(UserError, match=why):
        supported_strategy(name)
