"""vLLM within this process: its life, its weights, its requests, its memory.

The rest of the process does not see what it does to global state. Proves nothing. Source: vLLM's
offline interface, checked against release 0.32.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_grpo.rollout.engine import EngineFailed
from lit_grpo.rollout.requests import Request, Sample
from lit_grpo.rollout.vllm.process_state import IsolatedProcessState
from lit_grpo.rollout.vllm.sampling import sampling_params
from lit_grpo.types import UserError

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of much at every weight update
    "VLLM_NO_USAGE_STATS": "1",
}


class ColocatedVLLM:
    """One ``vllm.LLM``. What goes wrong in it ends it.

    Args:
        env: Environment variables that it alone sees.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.is_well = False
        self.is_asleep = False
        self._aside = IsolatedProcessState({**ENV, **env})
        self._llm: Any = None
        self._adapter: Any = None
        self._adapter_numbers = count(1)
        self._request_names = map(str, count())

    # Its life

    def start(self, *, sleeps: bool, **arguments: Any) -> None:
        """Load it with these arguments of ``vllm.LLM``.

        Args:
            sleeps: Whether it is to give a GPU's memory back, where it can.

        Raises:
            ValueError: vLLM is not installed, or does not start like this.
        """
        with self._aside:
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
        self.is_well = True

    @property
    def is_started(self) -> bool:
        return self._llm is not None

    @property
    def max_model_len(self) -> int:
        return self._llm.llm_engine.model_config.max_model_len

    def close(self) -> None:
        """Give all memory back, and end its process group."""
        with self._aside:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = self._adapter = None
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        self.is_well = self.is_asleep = False

    @contextmanager
    def _doing(self, what: str) -> Iterator[Any]:
        """vLLM, as long as all goes well."""
        try:
            with self._aside:
                yield self._llm
        except Exception as error:
            self.is_well = False
            if isinstance(error, EngineFailed):
                raise
            raise EngineFailed(f"vLLM failed at {what}: {error!r}") from error

    # Its weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy them tensor by tensor, and forget what the old ones wrote."""
        with self._doing("a weight update") as llm:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if not llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineFailed("vLLM's prefix cache could not be reset after a weight update.")

    def load_adapter(self, path: Path) -> None:
        """Sample with an adapter from now on; removes the one before, its directory too.

        Args:
            path: Another one each time: what vLLM caches goes by name and path.
        """
        with self._doing("an adapter's update") as llm:
            from vllm.lora.request import LoRARequest

            if self._adapter is not None:
                llm.llm_engine.remove_lora(self._adapter.lora_int_id)
                shutil.rmtree(self._adapter.lora_path)
            number = next(self._adapter_numbers)
            self._adapter = LoRARequest(f"policy-{number}", number, str(path))
            if not llm.llm_engine.add_lora(self._adapter):
                raise EngineFailed("vLLM did not take the policy's adapter.")

    # Its memory

    def wake(self) -> None:
        if self.is_asleep:
            with self._doing("waking up") as llm:
                llm.wake_up()
            self.is_asleep = False

    def fall_asleep(self, *, keeps_weights: bool) -> None:
        """Give the GPU's memory back; the weights are kept in host memory or nowhere."""
        if self._sleeps and self.is_well:
            with self._doing("falling asleep") as llm:
                llm.sleep(level=1 if keeps_weights else 2)
            self.is_asleep = True

    # Its requests

    def sample(
        self, requests: Sequence[Request], version: int
    ) -> Generator[tuple[int, int, Sample | str]]:
        """(number of the request, number of its sample, the sample or why there is none), as each
        ends. vLLM works while the next is waited for, and only then.

        Args:
            version: Of the weights.
        """
        running: dict[str, tuple[int, int]] = {}
        try:
            with self._doing("taking requests") as llm:
                refused = self._add(llm.llm_engine, requests, running)
            yield from refused
            while running:
                outputs: list[Any] = []
                with self._doing("sampling") as llm:
                    while not outputs:
                        outputs = llm.llm_engine.step()
                for output in outputs:
                    yield *running.pop(output.request_id), _ended(output, version)
        finally:
            if running and self.is_well:
                with self._doing("breaking off") as llm:
                    llm.llm_engine.abort_request(list(running))

    def _add(
        self, engine: Any, requests: Sequence[Request], running: dict[str, tuple[int, int]]
    ) -> list[tuple[int, int, str]]:
        """Every sample is a request of its own to vLLM; returns those that it refuses."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        refused = []
        for number, request in enumerate(requests):
            prompt = {"type": "token", "prompt_token_ids": list(request.token_ids)}
            for index, seed in request.seeds.items():
                params = SamplingParams(
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    **sampling_params(request, num_samples=1, seed=seed),
                )
                name = next(self._request_names)
                try:
                    engine.add_request(name, prompt, params, lora_request=self._adapter)
                    running[name] = (number, index)
                except (VLLMClientError, ValueError) as error:
                    refused.append((number, index, f"vLLM refused it: {error}"))
        return refused


def _ended(output: Any, version: int) -> Sample | str:
    (choice,) = output.outputs
    if choice.finish_reason not in ("stop", "length"):
        return f"vLLM ended it with {choice.finish_reason!r}"
    pairs = zip(choice.token_ids, choice.logprobs, strict=True)
    return Sample(
        token_ids=list(choice.token_ids),
        logprobs=[candidates[token].logprob for token, candidates in pairs],
        versions=[str(version)] * len(choice.token_ids),
        finish_reason=choice.finish_reason,
    )


def _import_vllm() -> tuple[Any, bool]:
    """The module, and whether it can give a GPU's memory back."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UserError(
            "VLLMEngine needs vLLM in the trainer's environment, where it is not installed. "
            "Install it (pip install vllm), or set model.engine to VLLMServerEngine and "
            "launch.python to the interpreter of an environment that has it."
        ) from None
    from vllm.platforms import current_platform

    return vllm, current_platform.is_sleep_mode_available()
