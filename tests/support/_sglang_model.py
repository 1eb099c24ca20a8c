"""A real tiny model behind what SGLang 0.5.23 promises: pauses, weights, adapters, aborts.

Every request steps in its turn with a key-value cache of its own. There is no prefix cache, and
nothing here knows of HTTP or of faults.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from _sglang_request import Request, SamplingParams, within
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

SEED_OF_ALL_WITHOUT = 42
PauseMode = Literal["abort", "retract", "in_place"]


class Engine:
    """Steps every running request in turn; ``flags`` are those of ``sglang.launch_server``."""

    def __init__(self, flags: Any) -> None:
        self.flags = flags
        self.model = AutoModelForCausalLM.from_pretrained(flags.model_path, dtype=torch.float32)
        self.model.eval()
        path = flags.tokenizer_path or flags.model_path
        self.tokenizer = None if flags.skip_tokenizer_init else AutoTokenizer.from_pretrained(path)
        self.eos_ids = self._end_of_sequence_ids()
        self.context_length = flags.context_length or self.model.config.max_position_embeddings
        self.model_path = flags.model_path
        self.weight_version = flags.weight_version
        self.adapters: dict[str, str] = {}
        """Name to path."""
        self.requests: dict[str, Request] = {}
        self.token_delay_seconds = 0.0
        self.is_paused = False
        self.num_dropped = 0
        """Requests whose consumer left before they had finished."""
        self.most_unfinished = 0
        """Most requests that were under way at once, since they were last counted anew."""
        self._is_frozen = False
        self._is_updating = False
        self._places = asyncio.Semaphore(flags.max_running_requests)
        self._noise = torch.Generator().manual_seed(flags.random_seed)

    def _end_of_sequence_ids(self) -> set[int]:
        known = [self.model.config.eos_token_id, self.model.generation_config.eos_token_id]
        known += [self.tokenizer.eos_token_id] if self.tokenizer else []
        return {one for ids in known for one in (ids if isinstance(ids, list) else [ids])} - {None}

    # Requests

    async def generate(self, request: Request, emit: Callable[[], Awaitable[None]]) -> None:
        """Calls ``emit`` after each new token and at the end; to cancel it aborts the request."""
        await until(lambda: not (self.is_paused or self._is_updating))
        self.requests[request.rid] = request
        self.most_unfinished = max(self.most_unfinished, self._num_unfinished)
        try:
            async with self._places:
                while request.finish_reason is None:
                    await asyncio.sleep(self.token_delay_seconds)
                    await until(lambda: self._may_step(request))
                    self._step(request)
                    await emit()
        finally:
            del self.requests[request.rid]
            self.num_dropped += request.finish_reason is None

    def count_anew(self) -> None:
        self.most_unfinished = self._num_unfinished

    @property
    def _num_unfinished(self) -> int:
        """One that has finished does not count, though its consumer may not know yet."""
        return sum(one.finish_reason is None for one in self.requests.values())

    def _may_step(self, request: Request) -> bool:
        is_running = request.cache is not None
        return not self._is_frozen or (request.is_aborted and not is_running)

    def abort(self, rid: str = "", *, is_all: bool = False) -> None:
        """Ends the request of this id, and all whose ids start like it, at their next turn."""
        is_known = rid in self.requests
        for request in self.requests.values():
            request.is_aborted |= is_all or (is_known and request.rid.startswith(rid))

    def check(self, request: Request) -> None:
        """Raises ValueError for what the server refuses before it generates."""
        params, num_prompt = request.params, len(request.prompt_ids)
        if request.rid in self.requests:
            raise ValueError(f"Duplicate request ID detected: {request.rid}")
        if num_prompt >= self.context_length:
            raise ValueError(
                f"The input ({num_prompt} tokens) is longer than the model's context length "
                f"({self.context_length} tokens)."
            )
        if num_prompt + (params.max_new_tokens or 0) > self.context_length:
            raise ValueError(
                "Requested token count exceeds the model's maximum context length of "
                f"{self.context_length} tokens."
            )
        if self.tokenizer is None and (params.stop_strings or params.min_new_tokens):
            raise ValueError("stop and min_new_tokens need a tokenizer (skip_tokenizer_init=True).")
        if request.adapter and request.adapter not in self.adapters:
            raise ValueError(f"Got LoRA adapter that has never been loaded: {request.adapter}")

    def text(self, request: Request) -> str | None:
        """Without the matched stop string or stop token, as the client shall see it."""
        if self.tokenizer is None:
            return None
        ids, params = request.output_ids, request.params
        matched = (request.finish_reason or {}).get("matched")
        is_trimmed = matched is not None and not params.no_stop_trim
        if is_trimmed and isinstance(matched, int):
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return text.split(matched)[0] if is_trimmed and isinstance(matched, str) else text

    # Steps

    @torch.inference_mode()
    def _step(self, request: Request) -> None:
        if request.is_aborted:
            request.finish_reason = _aborted(is_running=request.cache is not None)
            return
        logits = self._forward(request)
        if self._max_tokens(request) > 0:
            self._draw(logits, request)
        request.finish_reason = self._finish_reason(request)

    def _forward(self, request: Request) -> Tensor:
        """Logits [V] of the next token; without a cache the whole sequence is read anew."""
        is_prefill = request.cache is None
        if request.cache is None:
            request.cache = DynamicCache()
        ids = request.token_ids if is_prefill else request.token_ids[-1:]
        self._select(request.adapter)
        output = self.model(torch.tensor([ids]), past_key_values=request.cache, use_cache=True)
        if is_prefill and not request.output_ids and request.logprob_start_len >= 0:
            self._score_prompt(output.logits[0], request)
        return output.logits[0, -1]

    def _score_prompt(self, logits: Tensor, request: Request) -> None:
        """Neither the temperature nor anything else changes the logprobs of a prompt."""
        ids = torch.tensor(request.prompt_ids[request.logprob_start_len + 1 :])
        full = logits[request.logprob_start_len : -1].log_softmax(-1)
        request.prompt_logprobs = [None, *full.gather(1, ids[:, None])[:, 0].tolist()]

    def _draw(self, logits: Tensor, request: Request) -> None:
        params = request.params
        if len(request.output_ids) < params.min_new_tokens:
            logits[list(self._stop_ids(params))] = -torch.inf
        logprobs = (logits.double() / params.scale).log_softmax(-1)
        noise = 0.0 if params.is_greedy else self._gumbel(request, len(logits))
        token = int((within(logprobs, params) + noise).argmax())
        request.output_ids.append(token)
        request.logprobs.append(float(logprobs[token]))
        request.versions.append(self.weight_version)

    def _gumbel(self, request: Request, size: int) -> Tensor:
        """Seeds count in deterministic inference alone; then seed and position fix the noise."""
        noise = self._noise
        if self.flags.enable_deterministic_inference:
            seed = request.params.sampling_seed
            seed = SEED_OF_ALL_WITHOUT if seed is None else seed
            noise = torch.Generator().manual_seed(hash((seed, len(request.token_ids))))
        return -torch.empty(size, dtype=torch.float64).exponential_(generator=noise).log()

    def _stop_ids(self, params: SamplingParams) -> set[int]:
        return self.eos_ids | set(params.stop_token_ids or ())

    def _max_tokens(self, request: Request) -> int:
        room = max(self.context_length - len(request.prompt_ids) - 2, 0)
        wanted = request.params.max_new_tokens
        return room if wanted is None else min(wanted, room)

    def _finish_reason(self, request: Request) -> dict[str, Any] | None:
        params, length = request.params, self._max_tokens(request)
        last = request.output_ids[-1:]
        text = self.text(request) if params.stop_strings else ""
        for stop in params.stop_strings:
            if stop in (text or ""):
                return {"type": "stop", "matched": stop}
        if last and not params.ignore_eos and last[0] in self._stop_ids(params):
            return {"type": "stop", "matched": last[0]}
        is_full = len(request.output_ids) >= length
        return {"type": "length", "length": length} if is_full else None

    # Pauses

    async def pause(self, mode: PauseMode) -> None:
        """New requests wait in every mode; what becomes of the running ones is the mode."""
        self.is_paused = True
        if mode == "abort":
            self.abort(is_all=True)
            await until(lambda: not self.requests)
            return
        self._is_frozen = True
        if mode == "retract":
            for request in self._running():
                request.cache = None
                request.num_retractions += 1

    def resume(self) -> None:
        self.is_paused = self._is_frozen = False

    def _running(self) -> list[Request]:
        return [one for one in self.requests.values() if one.cache is not None]

    @property
    def is_idle(self) -> bool:
        """Whether the cache may be flushed: requests that were retracted do not hinder it."""
        return not (self._running() if self._is_frozen else self.requests)

    # Weights and adapters

    async def update_weights(self, change: Callable[[], None]) -> None:
        """Runs the change at once in a pause, else when every request has finished."""
        if self.is_paused:
            change()
            return
        self._is_updating = True
        try:
            await until(lambda: not self.requests)
            change()
        finally:
            self._is_updating = False

    @torch.no_grad()
    def load_weights(self, path: str) -> None:
        """Copies the tensors of every safetensors file; nothing changes when one does not fit."""
        new = {
            name: value for file in _weight_files(path) for name, value in load_file(file).items()
        }
        own = {name.replace(".base_layer", ""): one for name, one in self.model.named_parameters()}
        for name, value in new.items():
            if own[name].shape != value.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}")
        for name, value in new.items():
            own[name].copy_(value)
        self.model_path = path

    @torch.no_grad()
    def lose_weights(self) -> None:
        for parameter in self.model.parameters():
            parameter.zero_()

    def load_adapter(self, name: str, path: str, *, is_stale: bool = False) -> None:
        """A stale adapter has a name and no weights: it answers as the base model."""
        if name in self.adapters:
            raise ValueError(f"LoRA with name {name} already exists.")
        rank = json.loads((Path(path) / "adapter_config.json").read_text())["r"]
        if rank > (self.flags.max_lora_rank or rank):
            raise ValueError(f"LoRA adapter {name} has rank {rank}, above max_lora_rank.")
        if not is_stale:
            self.model.load_adapter(path, adapter_name=name)
            self.model.eval()
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Waits for the requests that use it."""
        if name not in self.adapters:
            raise ValueError(f"LoRA with name {name} does not exist.")
        del self.adapters[name]
        await until(lambda: all(one.adapter != name for one in self.requests.values()))
        if name in self._adapters_with_weights():
            self.model.delete_adapter(name)

    def _select(self, adapter: str | None) -> None:
        present = self._adapters_with_weights()
        if adapter in present:
            self.model.enable_adapters()
            self.model.set_adapter(adapter)
        elif present:
            self.model.disable_adapters()

    def _adapters_with_weights(self) -> Iterable[str]:
        return getattr(self.model, "peft_config", {})


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def _aborted(*, is_running: bool) -> dict[str, Any]:
    if is_running:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return {"type": "abort", "message": "Abort in waiting queue"}


def _weight_files(path: str) -> list[Path]:
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"Cannot find any model weights with `{path}`")
    return files
