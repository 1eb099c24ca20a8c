"""The weights of recent policy versions, on disk or in host memory, until every server has them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lit_grpo.policy.files.model_files import copy_weights, save_adapter, save_weights
from lit_grpo.policy.sharding import compute_device
from lit_grpo.rollout.engine import SampledPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWeights:
    """A copy of the full weights in host memory."""

    tensors: Mapping[str, Tensor]
    """Tensors by name in a checkpoint."""
    device: torch.device
    """Device of the policy; tensors are moved there one at a time to be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The policy's weights of one version: a directory that every server can read, or a copy."""

    version: int
    path: Path
    is_adapter: bool
    host_weights: HostWeights | None = field(default=None, compare=False, repr=False)
    """Used instead of the directory if weights are not sent in files; only on rank 0."""

    @property
    def adapter(self) -> WeightUpdate | None:
        """The adapter that requests have to name; None if the server's own weights are meant."""
        return self if self.is_adapter else None

    @property
    def name(self) -> str:
        """Name of the adapter; unique to its version, or a server might answer from its cache."""
        return f"policy-v{self.version}"


class WeightStore:
    """Save the policy's weights for the servers, and remove those no longer needed.

    Args:
        directory: Parent of one directory per version.
        dtype: Data type of full weights.
        is_adapter: Whether only the adapter is sent.
        in_files: Whether full weights are written to disk; otherwise they are kept in host memory.
        is_writer: Whether this rank stores the weights; the others only take part in gathering.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        is_adapter: bool,
        in_files: bool,
        is_writer: bool,
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._is_adapter = is_adapter
        self._in_files = in_files
        self._is_writer = is_writer

    def save(self, policy: SampledPolicy, version: int) -> WeightUpdate:
        """Save the policy's current weights; every rank must call it."""
        path, host_weights = self._directory / f"v{version}", None
        if self._is_adapter:
            save_adapter(policy.model, path, is_writer=self._is_writer)
        elif self._in_files:
            save_weights(policy.model, path, dtype=self._dtype, is_writer=self._is_writer)
        else:
            host_weights = self._copy(policy)
        return WeightUpdate(
            version=version, path=path, is_adapter=self._is_adapter, host_weights=host_weights
        )

    def _copy(self, policy: SampledPolicy) -> HostWeights | None:
        tensors = copy_weights(policy.model, dtype=self._dtype, is_writer=self._is_writer)
        if not self._is_writer:
            return None
        return HostWeights(tensors=tensors, device=compute_device(policy.model))

    def remove_all_but(self, versions: Set[int]) -> None:
        """Remove the files of all versions except these."""
        if not self._is_writer:
            return
        for path in self._directory.glob("v*"):
            if int(path.name[1:]) not in versions:
                shutil.rmtree(path, ignore_errors=True)
