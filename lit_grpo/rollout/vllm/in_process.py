"""Rollouts by vLLM within the trainer's process, on the trainer's GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

import torch

from lit_grpo.policy.files.model_files import save_adapter
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.rollout.engine import EngineFailed, RolloutEngine, SampledPolicy, Sampling
from lit_grpo.rollout.requests import group_requests, to_completion
from lit_grpo.rollout.scratch import ScratchDirectory
from lit_grpo.rollout.vllm.colocated import ColocatedVLLM
from lit_grpo.rollout.vllm.sampling import LogprobsMode, check_sampling, max_adapter_rank
from lit_grpo.rollout.weight_check import (
    CHECK_TEMPERATURE,
    ExpectedLogprobs,
    WeightCheck,
    WeightMismatch,
    check_logprobs,
    expected_logprobs,
    logprob_pair,
)
from lit_grpo.rollout.weights.base_model import adapter_rank, base_model, save_tokenizer
from lit_grpo.rollout.weights.sync import WeightSync, sends_adapter
from lit_grpo.types import Completion, Measurements, Prompt, UserError, setting_error
from lit_grpo.types.field_types import check_init
from lit_grpo.types.keywords import checks_keywords


@checks_keywords
class VLLMEngine(RolloutEngine):
    """Sample with vLLM in this process, for a run with a single process.

    Args:
        memory_fraction: Share of the GPU's memory for vLLM's weights and key-value cache.
        dtype: Data type of vLLM's weights; null for bfloat16 if trainer.precision is bf16-mixed,
            otherwise the policy's.
        max_model_len: Longest prompt and completion together, in tokens; null for the model's.
        flags: Further arguments of ``vllm.LLM`` by name, such as ``{max-num-seqs: 64}``.
        env: Further environment variables, which only vLLM sees.
        sleep: Free vLLM's GPU memory while nothing is sampled. Weights are kept in host memory if
            an adapter is sent; otherwise they are discarded and sent again.
        logprobs_mode: Which logprobs vLLM reports. ``processed_logprobs`` are those at the
            temperature, which training needs. ``raw_logprobs`` ignore it, so they are correct
            only at temperature 1; there they allow top-p and top-k.
        weight_sync: ``full`` sends all weights, with an adapter merged into them; ``adapter`` only
            the adapter; ``auto`` only the adapter if there is one and nothing else is trained.
        weight_check: How the trainer checks that vLLM samples from the policy's weights.

    Raises:
        UserError: ``memory_fraction`` is out of range.
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
        weight_check: WeightCheck = WeightCheck(),  # noqa: B008 - frozen
    ) -> None:
        check_init("model.engine.init_args", VLLMEngine, locals())
        if not 0 < memory_fraction < 1:
            raise setting_error(
                "model.engine.init_args.memory_fraction",
                "> 0 and < 1",
                memory_fraction,
                "the trainer needs the rest",
            )
        self.memory_fraction = memory_fraction
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.flags = flags or {}
        self.sleep = sleep
        self.logprobs_mode = logprobs_mode
        self.weight_sync = weight_sync
        self.weight_check = weight_check
        self._vllm = ColocatedVLLM(env or {})
        self._num_updates = 0
        self._check_differences: list[float] = []

    def check_processes(self, num_processes: int, num_nodes: int) -> None:
        """Check that there is a single process.

        Raises:
            UserError: there are several.
        """
        if num_processes > 1:
            raise _process_group_error(num_processes)

    def start(self, policy: SampledPolicy) -> None:
        """Load vLLM with a copy of the weights."""
        if self._vllm.is_started:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise _process_group_error(torch.distributed.get_world_size())
        self._is_adapter_sent = sends_adapter(policy.model, self.weight_sync)
        self._dtype = self.dtype or self.default_dtype(policy)
        self._scratch = ScratchDirectory("lit-grpo-engine-")
        arguments = {
            "model": base_model(policy, self._scratch.path / "model"),
            "tokenizer": save_tokenizer(policy, self._scratch.path / "tokenizer"),
            "dtype": self._dtype,
            "max_model_len": self.max_model_len,
            "gpu_memory_utilization": self.memory_fraction,
            "logprobs_mode": self.logprobs_mode,
        }
        if self._is_adapter_sent:
            max_rank = max_adapter_rank(adapter_rank(policy.model))
            arguments |= {"enable_lora": True, "max_lora_rank": max_rank, "max_loras": 1}
        arguments |= {name.replace("-", "_"): value for name, value in self.flags.items()}
        self._vllm.start(sleeps=self.sleep, **arguments)

    def close(self) -> None:
        """Free all memory, and remove temporary files."""
        if self._vllm.is_started:
            self._vllm.close()
            self._scratch.remove()
            self.version = -1

    def health(self) -> bool:
        return self._vllm.is_healthy

    @property
    def num_unfinished_tokens(self) -> int:
        return self._vllm.num_unfinished_tokens

    def observe(self) -> Measurements:
        """Return the weight checks since the last call."""
        differences, self._check_differences = self._check_differences, []
        return Measurements(means={"sampler/weight_check_difference": differences})

    def load_weights(self, policy: SampledPolicy, version: int) -> None:
        """Copy the weights to vLLM, and check that it samples from them."""
        self._policy = policy
        if version == self.version:
            return
        expected = (
            self._expected_logprobs() if self.weight_check.is_due(self._num_updates) else None
        )
        self._vllm.wake_up()
        self._send_weights()
        if expected is not None:
            self._check_weights(expected)
        self._num_updates += 1
        self.version = version

    def _send_weights(self) -> None:
        if self._is_adapter_sent:
            path = self._scratch.path / f"adapter-{self._num_updates}"
            save_adapter(self._policy.model, path, is_writer=True)
            self._vllm.load_adapter(path)
        else:
            self._vllm.load_weights(named_weights(self._policy.model))

    def _expected_logprobs(self) -> ExpectedLogprobs:
        is_raw = self.logprobs_mode == "raw_logprobs"
        return expected_logprobs(
            self._policy,
            self.weight_check,
            temperature=1.0 if is_raw else CHECK_TEMPERATURE,
            dtype=self._dtype,
            max_length=self._vllm.max_model_len,
        )

    def _check_weights(self, expected: ExpectedLogprobs) -> None:
        probes = expected.probes(adapter=None)
        requests = [request for request, _ in probes]
        pairs = []
        for number, _, sample in self._vllm.sample(requests, self.version, self.on_wait):
            if isinstance(sample, str):
                raise EngineFailed(f"vLLM's weights could not be checked: {sample}")
            pairs.append(logprob_pair(sample, probes[number][1]))
        try:
            self._check_differences.append(check_logprobs(pairs, expected, "vLLM in this process"))
        except WeightMismatch as error:
            self._vllm.is_healthy = False
            raise EngineFailed(str(error)) from error

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Sample while the caller waits for the next completion."""
        check_sampling(sampling, self.logprobs_mode)
        requests = group_requests(self._policy, prompts, group_size, sampling, seed)
        self._wake_up_with_weights()
        try:
            sampled = self._vllm.sample(requests, self.version, self.stop_if_asked)
            with closing(sampled) as samples:
                for number, index, sample in samples:
                    completion = to_completion(sample, self._policy.tokenizer, sampling)
                    yield number * group_size + index, completion
        finally:
            self._vllm.sleep(keeps_weights=self._is_adapter_sent)

    def _wake_up_with_weights(self) -> None:
        """Wake vLLM up, and resend weights that it discarded; the policy still has that version."""
        had_discarded_weights = self._vllm.is_asleep and not self._is_adapter_sent
        self._vllm.wake_up()
        if had_discarded_weights:
            self._send_weights()


def _process_group_error(num_processes: int) -> UserError:
    return UserError(
        "VLLMEngine needs a run with a single process and no process group, got a group of "
        f"{num_processes} (vLLM creates and destroys its own groups in the process). Set "
        "trainer.devices to 1 and trainer.strategy to auto, or model.engine to VLLMServerEngine, "
        "whose servers all ranks share."
    )
