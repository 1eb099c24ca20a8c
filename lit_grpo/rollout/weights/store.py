"""Where the policy's weights stand until every server has them: a directory a version, or memory.

Asks no server anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lit_grpo.rollout.engine import SampledPolicy
from lit_grpo.rollout.weights.files import copy_weights, save_adapter, save_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWeights:
    """Full weights in this process's memory."""

    tensors: Mapping[str, Tensor]
    """By their names in a checkpoint."""
    device: torch.device
    """What they are sent from, one after the other: the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The policy's weights of one version, on disk where every server can read them, or here."""

    version: int
    path: Path
    is_adapter: bool
    weights: HostWeights | None = field(default=None, compare=False, repr=False)
    """In place of the path's, on the rank that updates the servers."""

    @property
    def adapter(self) -> WeightUpdate | None:
        """To sample with; None where the server's own weights are these."""
        return self if self.is_adapter else None

    @property
    def name(self) -> str:
        """Of the adapter; a name of its own a version, or a server's cache would be stale."""
        return f"policy-v{self.version}"


class WeightStore:
    """The weights of some versions, kept by one rank.

    Args:
        directory: Gets a directory a version.
        dtype: Of full weights.
        is_adapter: Whether the adapter is sent alone.
        in_files: Whether full weights are written; else they stay in the keeper's memory.
        is_keeper: Whether this rank has them; the others only take part in the gathering.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        is_adapter: bool,
        in_files: bool,
        is_keeper: bool,
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._is_adapter = is_adapter
        self._in_files = in_files
        self._is_keeper = is_keeper

    def put(self, policy: SampledPolicy, version: int) -> WeightUpdate:
        """The policy's present weights; all ranks must call it."""
        path, host_weights = self._directory / f"v{version}", None
        if self._is_adapter:
            save_adapter(policy.model, path, is_writer=self._is_keeper)
        elif self._in_files:
            save_weights(policy.model, path, dtype=self._dtype, is_writer=self._is_keeper)
        else:
            host_weights = self._in_memory(policy)
        return WeightUpdate(
            version=version, path=path, is_adapter=self._is_adapter, weights=host_weights
        )

    def _in_memory(self, policy: SampledPolicy) -> HostWeights | None:
        tensors = copy_weights(policy.model, dtype=self._dtype, is_keeper=self._is_keeper)
        device = next(policy.model.parameters()).device
        return HostWeights(tensors=tensors, device=device) if self._is_keeper else None

    def remove_all_but(self, versions: Set[int]) -> None:
        """What no server will ask for any more."""
        if not self._is_keeper:
            return
        for path in self._directory.glob("v*"):
            if int(path.name[1:]) not in versions:
                shutil.rmtree(path, ignore_errors=True)
