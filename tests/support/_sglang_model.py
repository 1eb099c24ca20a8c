"""The scheduler of the test server: what SGLang 0.5.23 documents on pauses, weights and aborts.

Requests take turns, each with its own key-value cache. There is no prefix cache; HTTP and faults
are handled elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from _sglang_llama import Adapter, Array, Llama, log_softmax
from _sglang_request import Request, SamplingParams, within
from tokenizers import Tokenizer

DEFAULT_SEED = 42
PauseMode = Literal["abort", "retract", "in_place"]


class Engine:
    """The running requests and their model; ``flags`` are those of ``sglang.launch_server``."""

    def __init__(self, flags: Any) -> None:
        self.flags = flags
        self.model = Llama(flags.model_path)
        path = Path(flags.tokenizer_path or flags.model_path)
        self.tokenizer: Tokenizer | None = None
        if not flags.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.eos_ids = self._end_of_sequence_ids(path)
        self.context_length = flags.context_length or self.model.config["max_position_embeddings"]
        self.model_path = flags.model_path
        self.weight_version = flags.weight_version
        self.adapters: dict[str, str] = {}
        """Name to path."""
        self.requests: dict[str, Request] = {}
        self.token_delay_seconds = 0.0
        self.hold_after_tokens: int | None = None
        self.is_paused = False
        self.num_dropped = 0
        """Requests whose client disconnected before they had finished."""
        self.most_unfinished = 0
        """Largest number of unfinished requests since ``reset_count``."""
        self._is_frozen = False
        self._is_updating = False
        self._places = asyncio.Semaphore(flags.max_running_requests)
        self._noise = np.random.default_rng(flags.random_seed)

    def _end_of_sequence_ids(self, tokenizer_path: Path) -> set[int]:
        generation = Path(self.flags.model_path, "generation_config.json")
        known = [self.model.config["eos_token_id"]]
        known += [_read(generation).get("eos_token_id")] if generation.exists() else []
        if self.tokenizer is not None:
            text = _read(tokenizer_path / "tokenizer_config.json")["eos_token"]
            known.append(self.tokenizer.token_to_id(text))
        return {one for ids in known for one in (ids if isinstance(ids, list) else [ids])} - {None}

    async def generate(self, request: Request, emit: Callable[[], Awaitable[None]]) -> None:
        """Call ``emit`` after each new token and at the end; cancelling aborts the request."""
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

    def reset_count(self) -> None:
        self.most_unfinished = self._num_unfinished

    @property
    def _num_unfinished(self) -> int:
        """Requests that have finished are not counted, even if their client does not know yet."""
        return sum(one.finish_reason is None for one in self.requests.values())

    def _may_step(self, request: Request) -> bool:
        is_running = request.cache is not None
        if self._is_frozen:
            return request.is_aborted and not is_running
        return request.is_aborted or not self._is_held(request)

    def _is_held(self, request: Request) -> bool:
        limit = self.hold_after_tokens
        return limit is not None and len(request.output_ids) >= limit

    @property
    def num_held(self) -> int:
        return sum(map(self._is_held, self.requests.values()))

    def abort(self, rid: str = "", *, is_all: bool = False) -> None:
        """Abort the request with this id, and all whose ids start with it, at their next turn."""
        is_known = rid in self.requests
        for request in self.requests.values():
            request.is_aborted |= is_all or (is_known and request.rid.startswith(rid))

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that the server refuses."""
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
        """Return the text for the client, without the matched stop string or stop token."""
        if self.tokenizer is None:
            return None
        ids, params = request.output_ids, request.params
        matched = (request.finish_reason or {}).get("matched")
        is_trimmed = matched is not None and not params.no_stop_trim
        if is_trimmed and isinstance(matched, int):
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return text.split(matched)[0] if is_trimmed and isinstance(matched, str) else text

    def _step(self, request: Request) -> None:
        if request.is_aborted:
            request.finish_reason = _aborted(is_running=request.cache is not None)
            return
        logits = self._forward(request)
        if self._max_tokens(request) > 0:
            self._draw(logits, request)
        request.finish_reason = self._finish_reason(request)

    def _forward(self, request: Request) -> Array:
        """Return [V] logits of the next token; without a cache the whole sequence is read again."""
        is_prefill = request.cache is None
        if request.cache is None:
            request.cache = []
        ids = request.token_ids if is_prefill else request.token_ids[-1:]
        logits = self.model.forward(ids, request.cache, request.adapter)
        if is_prefill and not request.output_ids and request.logprob_start_len >= 0:
            self._score_prompt(logits, request)
        return logits[-1]

    def _score_prompt(self, logits: Array, request: Request) -> None:
        """Store the logprobs of the prompt, which no sampling parameter changes."""
        ids = request.prompt_ids[request.logprob_start_len + 1 :]
        full = log_softmax(logits[request.logprob_start_len : -1])
        request.prompt_logprobs = [None, *full[np.arange(len(ids)), ids].tolist()]

    def _draw(self, logits: Array, request: Request) -> None:
        params = request.params
        if len(request.output_ids) < params.min_new_tokens:
            logits[list(self._stop_ids(params))] = -np.inf
        logprobs = log_softmax(logits.astype(np.float64) / params.scale)
        noise = 0.0 if params.is_greedy else self._gumbel(request, len(logits))
        token = int((within(logprobs, params) + noise).argmax())
        request.output_ids.append(token)
        request.logprobs.append(float(logprobs[token]))
        request.versions.append(self.weight_version)

    def _gumbel(self, request: Request, size: int) -> Any:
        """Return noise, fixed by seed and position in deterministic inference and only there."""
        noise = self._noise
        if self.flags.enable_deterministic_inference:
            seed = request.params.sampling_seed
            noise = np.random.default_rng(
                [DEFAULT_SEED if seed is None else seed, len(request.token_ids)]
            )
        return -np.log(noise.exponential(size=size))

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

    async def pause(self, mode: PauseMode) -> None:
        """Make new requests wait; the mode says what happens to the running ones."""
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
        """Whether the cache may be flushed: retracted requests do not use it."""
        return not (self._running() if self._is_frozen else self.requests)

    async def update_weights(self, change: Callable[[], None]) -> None:
        """Run the change at once in a pause, otherwise when every request has finished."""
        if self.is_paused:
            change()
            return
        self._is_updating = True
        try:
            await until(lambda: not self.requests)
            change()
        finally:
            self._is_updating = False

    def load_weights(self, path: str) -> None:
        self.model.load_weights(path)
        self.model_path = path

    def load_adapter(self, name: str, path: str, *, is_stale: bool = False) -> None:
        """Load an adapter; a stale one has a name but no weights, and answers as the base model."""
        if name in self.adapters:
            raise ValueError(f"LoRA with name {name} already exists.")
        adapter = Adapter(path)
        if adapter.rank > (self.flags.max_lora_rank or adapter.rank):
            raise ValueError(f"LoRA adapter {name} has rank {adapter.rank}, above max_lora_rank.")
        if not is_stale:
            self.model.adapters[name] = adapter
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter when the requests that use it have finished."""
        if name not in self.adapters:
            raise ValueError(f"LoRA with name {name} does not exist.")
        del self.adapters[name]
        await until(lambda: all(one.adapter != name for one in self.requests.values()))
        self.model.adapters.pop(name, None)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def _aborted(*, is_running: bool) -> dict[str, Any]:
    if is_running:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return {"type": "abort", "message": "Abort in waiting queue"}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
