"""vLLM within this process: start it, update its weights, sample, and put it to sleep.

Its changes to global state are hidden from the rest of the process. Source: vLLM's offline
interface, checked against release 0.32.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lit_grpo.rollout.engine import LOOK_SECONDS, EngineFailed
from lit_grpo.rollout.requests import STREAM_INTERVAL, Request, Sample
from lit_grpo.rollout.vllm.process_state import IsolatedProcessState
from lit_grpo.rollout.vllm.sampling import sampling_params
from lit_grpo.types import UserError

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",  # every weight update logs warnings
    "VLLM_NO_USAGE_STATS": "1",
}


class ColocatedVLLM:
    """One ``vllm.LLM``. After any error it is unhealthy and cannot be used again.

    Args:
        env: Environment variables that only vLLM sees.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.is_healthy = False
        self.is_asleep = False
        self._isolated = IsolatedProcessState({**ENV, **env})
        self._llm: Any = None
        self._adapter: Any = None
        self._adapter_numbers = count(1)
        self._request_names = map(str, count())
        self._num_tokens: dict[str, int] = {}
        """Name of a request that is not finished -> its tokens so far."""

    def start(self, *, sleeps: bool, **arguments: Any) -> None:
        """Load vLLM with these arguments of ``vllm.LLM``.

        Args:
            sleeps: Whether ``sleep`` frees GPU memory, on platforms that support it.

        Raises:
            UserError: vLLM is not installed, or does not start with these arguments.
        """
        with self._isolated:
            vllm, can_sleep = _import_vllm()
            self._sleeps = sleeps and can_sleep
            try:
                self._llm = vllm.LLM(
                    enable_sleep_mode=self._sleeps, **{"use_tqdm_on_load": False} | arguments
                )
            except Exception as error:
                raise UserError(
                    f"vLLM did not start: {error} (it shares the GPU with the policy and its "
                    "optimizer). Set model.engine.init_args.memory_fraction, max_model_len, "
                    "sleep or flags, or model.engine to VLLMServerEngine."
                ) from error
        self.is_healthy = True

    @property
    def is_started(self) -> bool:
        return self._llm is not None

    @property
    def num_unfinished_tokens(self) -> int:
        return sum(list(self._num_tokens.values()))

    @property
    def max_model_len(self) -> int:
        return cast(int, self._llm.llm_engine.model_config.max_model_len)

    def close(self) -> None:
        """Free all memory, and destroy vLLM's process group."""
        with self._isolated:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = self._adapter = None
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        self.is_healthy = self.is_asleep = False

    @contextmanager
    def _calling(self, what: str) -> Iterator[Any]:
        """Yield the ``vllm.LLM``; any error within makes it unhealthy and becomes EngineFailed."""
        try:
            with self._isolated:
                yield self._llm
        except Exception as error:
            self.is_healthy = False
            if isinstance(error, EngineFailed):
                raise
            raise EngineFailed(f"vLLM failed while {what}: {error!r}") from error

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights tensor by tensor, and reset the prefix cache."""
        with self._calling("updating its weights") as llm:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if not llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineFailed("vLLM's prefix cache could not be reset after a weight update.")

    def load_adapter(self, path: Path) -> None:
        """Sample with an adapter from now on; remove the previous one and its directory.

        Args:
            path: A new path each time, because vLLM caches adapters by name and path.
        """
        with self._calling("updating its adapter") as llm:
            from vllm.lora.request import LoRARequest

            if self._adapter is not None:
                llm.llm_engine.remove_lora(self._adapter.lora_int_id)
                shutil.rmtree(self._adapter.lora_path)
            number = next(self._adapter_numbers)
            self._adapter = LoRARequest(f"policy-{number}", number, str(path))
            if not llm.llm_engine.add_lora(self._adapter):
                raise EngineFailed("vLLM did not accept the policy's adapter.")

    def wake_up(self) -> None:
        if self.is_asleep:
            with self._calling("waking up") as llm:
                torch.cuda.empty_cache()  # else the trainer's allocator keeps what an update took
                llm.wake_up()
            self.is_asleep = False

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free GPU memory; the weights are kept in host memory, or discarded."""
        if self._sleeps and self.is_healthy:
            with self._calling("going to sleep") as llm:
                llm.sleep(level=1 if keeps_weights else 2)
            self.is_asleep = True

    def sample(
        self,
        requests: Sequence[Request],
        version: int,
        on_step: Callable[[], None],
    ) -> Generator[tuple[int, int, Sample | str]]:
        """Yield (index of the request, index of its sample, the sample or an error message).

        vLLM runs only while the caller waits for the next one. Closing the generator aborts the
        remaining requests.

        Args:
            version: Version of the weights in use.
            on_step: Called about once a second between vLLM's steps; it may raise to end them.
        """
        running: dict[str, tuple[int, int]] = {}
        try:
            with self._calling("adding requests") as llm:
                refused = self._add(llm.llm_engine, requests, running)
            yield from refused
            while running:
                on_step()
                outputs: list[Any] = []
                pause_at = time.monotonic() + LOOK_SECONDS
                with self._calling("sampling") as llm:
                    while not outputs and time.monotonic() < pause_at:
                        outputs = llm.llm_engine.step()
                self._num_tokens |= {one.request_id: _num_tokens(one) for one in outputs}
                for output in (one for one in outputs if one.finished):
                    del self._num_tokens[output.request_id]
                    yield *running.pop(output.request_id), _to_sample(output, version)
        finally:
            self._num_tokens = {}
            if running and self.is_healthy:
                with self._calling("aborting requests") as llm:
                    llm.llm_engine.abort_request(list(running))

    def _add(
        self, engine: Any, requests: Sequence[Request], running: dict[str, tuple[int, int]]
    ) -> list[tuple[int, int, str]]:
        """Add one vLLM request per sample; return the samples that it refuses, with messages."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        refused = []
        for number, request in enumerate(requests):
            prompt = {"type": "token", "prompt_token_ids": list(request.token_ids)}
            for index, seed in request.seeds.items():
                params = SamplingParams(
                    output_kind=RequestOutputKind.CUMULATIVE,
                    stream_interval=STREAM_INTERVAL,
                    **sampling_params(request, num_samples=1, seed=seed),
                )
                name = next(self._request_names)
                try:
                    engine.add_request(name, prompt, params, lora_request=self._adapter)
                    running[name] = (number, index)
                except (VLLMClientError, ValueError) as error:
                    refused.append((number, index, f"vLLM refused the request: {error}"))
        return refused


def _num_tokens(output: Any) -> int:
    (choice,) = output.outputs
    return len(choice.token_ids)


def _to_sample(output: Any, version: int) -> Sample | str:
    (choice,) = output.outputs
    if choice.finish_reason not in ("stop", "length"):
        return f"vLLM ended the completion with {choice.finish_reason!r}"
    pairs = zip(choice.token_ids, choice.logprobs, strict=True)
    return Sample(
        token_ids=list(choice.token_ids),
        logprobs=[candidates[token].logprob for token, candidates in pairs],
        versions=[str(version)] * len(choice.token_ids),
        finish_reason=choice.finish_reason,
    )


def _import_vllm() -> tuple[Any, bool]:
    """Return the module, and whether ``sleep`` can free GPU memory on this platform."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UserError(
            "VLLMEngine needs vLLM, which is not installed in the trainer's environment. Install "
            "it (pip install 'lit-grpo[vllm]'), or set model.engine to VLLMServerEngine and "
            "model.engine.init_args.launch.python to the interpreter of an environment that has it."
        ) from None
    from vllm.platforms import current_platform

    return vllm, current_platform.is_sleep_mode_available()
