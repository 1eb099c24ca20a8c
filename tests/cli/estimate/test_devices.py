"""How devices are named, and what limits the transfers between them."""

from __future__ import annotations

import pytest

from lit_grpo.cli.estimate.devices import DEVICES, Cluster, device_of_gpu, parse_gpus
from lit_grpo.types import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH100", (8, "H100")),
        ("h200", (1, "H200")),
        ("2 x a100", (2, "A100-80")),
        ("4xA100-40", (4, "A100-40")),
        ("4090", (1, "4090")),
        ("8x4090", (8, "4090")),
        ("2xcpu", (2, "cpu")),
    ],
)
def test_a_number_and_a_name_are_read(text, expected):
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["8xH900", "0xH100", "", "H100x8"])
def test_others_are_refused_with_those_that_are_known(text):
    with pytest.raises(UserError, match=r"gpus must be .* out of H100, H200, .*, cpu, got"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_cuda_gives_it(name, expected):
    assert device_of_gpu(name).name == expected


def test_a_gpu_that_is_not_in_the_table_is_refused():
    with pytest.raises(UserError, match="--gpus must be the most similar of H100"):
        device_of_gpu("NVIDIA T4")


def test_the_network_limits_transfers_between_nodes_only():
    one = Cluster(device=DEVICES["A100-80"], per_node=8)
    two = Cluster(device=DEVICES["A100-80"], per_node=8, num_nodes=2)
    assert (one.num_ranks, two.num_ranks) == (8, 16)
    assert (one.collective_rate, two.collective_rate) == (300e9, 200e9)
