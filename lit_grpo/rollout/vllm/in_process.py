"""Rollouts by vLLM within the trainer's process, on the trainer's GPU.

Nothing that vLLM does to the process is seen by the trainer: see `_aside`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

import torch

from lit_grpo.rollout.engine import EngineFailed, RolloutEngine, SampledPolicy, Sampling
from lit_grpo.rollout.requests import group_requests, one_token_each, to_completion
from lit_grpo.rollout.server.api import ServerAPI
from lit_grpo.rollout.server.launching import model_to_start_with, save_tokenizer
from lit_grpo.rollout.server.scratch import ScratchDirectory
from lit_grpo.rollout.vllm.colocated import ColocatedVLLM
from lit_grpo.rollout.vllm.sampling import LogprobsMode, adapter_room, check_sampling
from lit_grpo.rollout.weight_check import (
    NUM_SAMPLES,
    ExpectedLogprobs,
    Proof,
    WeightMismatch,
    check_pairs,
    expect,
)
from lit_grpo.rollout.weights.files import WeightSync, save_adapter, sends_adapter
from lit_grpo.rollout.weights.named import named_weights
from lit_grpo.types import Completion, Measurements, Prompt, UserError


class VLLMEngine(RolloutEngine):
    """Samples with vLLM in this process, for a run of one process.

    Args:
        memory_fraction: Of the GPU's memory for vLLM's weights and key-value cache.
        dtype: Of vLLM's weights; the policy's when null.
        max_model_len: Longest prompt and completion together, in tokens; the model's when null.
        flags: Further arguments of ``vllm.LLM`` by name, such as ``{max-num-seqs: 64}``.
        env: Further environment variables, which vLLM alone sees.
        sleep: Give the GPU's memory back while nothing is sampled. The weights are then kept in
            host memory where an adapter is sent, else dropped and sent again.
        logprobs_mode: Which logprobs vLLM reports. ``processed_logprobs`` are under the
            temperature, which training needs. ``raw_logprobs`` are right at temperature 1 only,
            where they allow top-p and top-k.
        weight_sync: ``full`` sends all weights, with an adapter merged into them; ``adapter`` the
            adapter alone; ``auto`` the adapter where there is one and nothing else is trained.
        proof: How it is proven that vLLM holds the policy's weights.

    Raises:
        ValueError: a fraction out of range.
    """

    def __init__(
        self,
        memory_fraction: float = 0.4,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        max_model_len: int | None = None,
        flags: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        sleep: bool = True,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        weight_sync: WeightSync = "auto",
        proof: Proof = Proof(),  # noqa: B008 - frozen
    ) -> None:
        if not 0 < memory_fraction < 1:
            raise UserError(
                f"memory_fraction must lie in (0, 1), got {memory_fraction} (the trainer needs the "
                "rest). Set model.engine.init_args.memory_fraction."
            )
        self.memory_fraction = memory_fraction
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.flags = flags or {}
        self.sleep = sleep
        self.logprobs_mode = logprobs_mode
        self.weight_sync = weight_sync
        self.proof = proof
        self._vllm = ColocatedVLLM(env or {})
        self._num_updates = 0
        self._differences: list[float] = []

    # The life of the engine

    def start(self, policy: SampledPolicy) -> None:
        """Load vLLM with a copy of the weights."""
        if self._vllm.is_started:
            return
        _refuse_process_group()
        self._is_adapter_sent = sends_adapter(policy.model, self.weight_sync)
        self._dtype = self.dtype or str(policy.model.dtype).removeprefix("torch.")
        self._scratch = ScratchDirectory("lit-grpo-engine-")
        arguments = {
            "model": model_to_start_with(policy, self._scratch.path / "model"),
            "tokenizer": save_tokenizer(policy, self._scratch.path / "tokenizer"),
            "dtype": self._dtype,
            "max_model_len": self.max_model_len,
            "gpu_memory_utilization": self.memory_fraction,
            "logprobs_mode": self.logprobs_mode,
        }
        if self._is_adapter_sent:
            room = adapter_room(policy.model.peft_config["default"].r)
            arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
        arguments |= {name.replace("-", "_"): value for name, value in self.flags.items()}
        self._vllm.start(sleeps=self.sleep, **arguments)

    def close(self) -> None:
        """Give back all memory, and what was written on the way."""
        if self._vllm.is_started:
            self._vllm.close()
            self._scratch.remove()
            self.version = -1

    def health(self) -> bool:
        return self._vllm.is_well

    def observe(self) -> Measurements:
        """The proofs since the last call."""
        differences, self._differences = self._differences, []
        return Measurements(means={"sampler/proof_difference": differences})

    # Weights

    def load_weights(self, policy: SampledPolicy, version: int) -> None:
        """Copy the weights to vLLM, and see them proven."""
        self._policy = policy
        if version == self.version:
            return
        expected = self._expectation() if self.proof.is_due(self._num_updates) else None
        self._vllm.wake()
        self._send()
        if expected is not None:
            self._prove(expected)
        self._num_updates += 1
        self.version = version

    def _send(self) -> None:
        if self._is_adapter_sent:
            path = self._scratch.path / f"adapter-{self._num_updates}"
            save_adapter(self._policy.model, path, is_writer=True)
            self._vllm.load_adapter(path)
        else:
            self._vllm.load_weights(named_weights(self._policy.model))

    def _expectation(self) -> ExpectedLogprobs:
        is_raw = self.logprobs_mode == "raw_logprobs"
        return expect(
            self._policy,
            self.proof,
            temperature=1.0 if is_raw else ServerAPI.temperature_of_logprobs,
            dtype=self._dtype,
            max_length=self._vllm.max_model_len,
        )

    def _prove(self, expected: ExpectedLogprobs) -> None:
        cases = expected.cases()
        requests = [
            one_token_each(tokens, NUM_SAMPLES, expected.temperature, None) for tokens, _ in cases
        ]
        pairs = []
        for number, _, sample in self._vllm.sample(requests, self.version):
            if isinstance(sample, str):
                raise EngineFailed(f"vLLM's weights could not be proven: {sample}")
            trainer_logprobs = cases[number][1]
            pairs.append((sample.logprobs[0], trainer_logprobs[sample.token_ids[0]].item()))
        try:
            self._differences.append(check_pairs(pairs, expected, "vLLM in this process"))
        except WeightMismatch as error:
            self._vllm.is_well = False
            raise EngineFailed(str(error)) from error

    # Rollouts

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Sampling goes on while the next completion is waited for."""
        check_sampling(sampling, self.logprobs_mode)
        requests = group_requests(self._policy, prompts, group_size, sampling, seed)
        self._wake_with_weights()
        try:
            with closing(self._vllm.sample(requests, self.version)) as samples:
                for number, index, sample in samples:
                    completion = to_completion(sample, self._policy.tokenizer, sampling)
                    yield number * group_size + index, completion
        finally:
            self._vllm.fall_asleep(keeps_weights=self._is_adapter_sent)

    def _wake_with_weights(self) -> None:
        """The policy is still at the version that it was at when vLLM fell asleep."""
        had_dropped_weights = self._vllm.is_asleep and not self._is_adapter_sent
        self._vllm.wake()
        if had_dropped_weights:
            self._send()


def _refuse_process_group() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UserError(
            "VLLMEngine needs a run of one process without a process group, got a group of "
            f"{torch.distributed.get_world_size()} (vLLM makes and ends groups of its own within "
            "the process). Set trainer.devices to 1 and trainer.strategy to auto, or model.engine "
            "to VLLMServerEngine, whose servers all ranks share."
        )
