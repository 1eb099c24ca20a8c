"""A teacher behind vLLM servers, which report the logprobs of the tokens of a prompt.

Source: vLLM's ``prompt_logprobs``, checked against release 0.32.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_grpo.concurrency import EventLoopThread, backoff, gather_or_cancel, wait_for
from lit_grpo.policy import Policy
from lit_grpo.policy.teacher import Teacher, TeacherFailed, probe_text, wrong_tokenizer
from lit_grpo.rollout.server.api_key import check_variable, choose_key
from lit_grpo.rollout.server.endpoint import (
    Endpoint,
    RequestRefused,
    ServerError,
    in_words,
    reading,
)
from lit_grpo.rollout.server.launching import check_url
from lit_grpo.types import TokenBatch, UserError, check_range, setting_error
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

FIRST_BACKOFF, MAX_BACKOFF = 0.5, 30.0
_KEY = "model.teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    endpoint: Endpoint
    model: str
    max_positions: int
    slots: asyncio.Semaphore


@checks_keywords
class VLLMTeacher(Teacher):
    """A teacher behind one or several running vLLM servers.

    They need no special options, except ``--max-logprobs K`` for a ``top_k`` above vLLM's default
    of 20. vLLM reports these logprobs at temperature 1 only.

    Args:
        urls: Addresses of servers with the same model, such as ``["http://10.0.0.2:8000"]``.
        api_key_variable: Name, in capitals, of the environment variable with the servers' API key;
            null if they require none.
        request_timeout: Seconds after which a request fails.
        give_up_after_seconds: How long a failed request is repeated before the run stops with exit
            code 5; a resumed run repeats the step.
        max_concurrency: Completions that each process of the run sends to a server at a time.

    Raises:
        UserError: a setting is out of range.
    """

    def __init__(
        self,
        urls: list[str],
        api_key_variable: str | None = None,
        request_timeout: float = 600.0,
        give_up_after_seconds: float = 600.0,
        max_concurrency: int = 64,
    ) -> None:
        if not urls:
            raise setting_error(f"{_KEY}.urls", "one address or more", urls)
        for url in urls:
            check_url(url, _KEY)
        check_variable(api_key_variable, _KEY)
        check_range(f"{_KEY}.request_timeout", request_timeout, above=0)
        check_range(f"{_KEY}.give_up_after_seconds", give_up_after_seconds, at_least=0)
        check_range(f"{_KEY}.max_concurrency", max_concurrency, at_least=1)
        self.urls = urls
        self.api_key_variable = api_key_variable
        self.request_timeout = request_timeout
        self.give_up_after_seconds = give_up_after_seconds
        self.max_concurrency = max_concurrency
        self._loop: EventLoopThread | None = None
        self._servers: list[_Server] = []
        self._is_failing = False

    def load(self, policy: Policy, *, temperature: float, top_k: int | None) -> None:
        """Connect to the servers, and let each read a few tokens.

        Raises:
            UserError: the temperature is not 1, a server does not answer or refuses the tokens, or
                its tokenizer is not the policy's.
        """
        if self._loop is not None:
            return
        if temperature != 1:
            raise setting_error(
                "model.sampling.temperature",
                "1 with a teacher behind vLLM servers",
                temperature,
                "they report the logprobs of a given text at temperature 1 only; a teacher by its "
                "path, model.teacher.path, has any temperature",
            )
        self._vocab_size = policy.body_and_head.vocab_size
        self._top_k = None if top_k is None else min(top_k, self._vocab_size)
        api_key = choose_key(self.api_key_variable, is_launched=False, key=_KEY)
        self._loop = EventLoopThread("teacher")
        try:
            for url in self.urls:
                self._loop.run(self._connect(url, api_key, policy.tokenizer))
        except BaseException:
            self.close()
            raise

    def to(self, device: torch.device) -> None:
        """Do nothing: the weights are elsewhere."""

    @property
    def max_positions(self) -> int | None:
        return min(server.max_positions for server in self._servers)

    def read(self, batch: TokenBatch) -> list[Tensor]:
        assert self._loop is not None, "load() comes first"
        self._is_failing = False
        found = wait_for(self._loop.submit(self._read_rows(batch)), on_wait=self.on_wait)
        shape = batch.completion_ids.shape
        if self._top_k is None:
            values = [torch.zeros(shape)]
        else:
            ids = torch.zeros(*shape, self._top_k, dtype=torch.int32)
            values = [ids, torch.zeros(ids.shape)]
        for row, parts in enumerate(found):
            for value, part in zip(values, parts, strict=True):
                value[row, : len(part)] = torch.tensor(part, dtype=value.dtype)
        return values

    def close(self) -> None:
        if self._loop is None:
            return
        self._loop.run(gather_or_cancel([server.endpoint.close() for server in self._servers]))
        self._loop.close()
        self._loop, self._servers = None, []

    async def _connect(
        self, url: str, api_key: str | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Add a server that answers and has the policy's tokenizer."""
        endpoint = Endpoint(url, self.request_timeout, api_key)
        try:
            self._servers.append(await self._check(endpoint, tokenizer))
        except BaseException as error:
            await endpoint.close()
            if not isinstance(error, RequestRefused | ServerError):
                raise
            raise UserError(
                f"the teacher's server at {url} must answer before training, got: {error}. Start "
                f"it with `vllm serve`{self._needed_option()}, or set {_KEY}.urls to its address."
            ) from None

    async def _check(self, endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase) -> _Server:
        """Return a server that has the policy's tokenizer and reads a few tokens."""
        seconds, text = self.request_timeout, probe_text(tokenizer)
        models = await endpoint.call("GET", "/v1/models", seconds=seconds)
        with reading(models):
            name, length = models["data"][0]["id"], models["data"][0]["max_model_len"]
        server = _Server(
            endpoint=endpoint,
            model=name,
            max_positions=length - 1,  # a request also samples a token
            slots=asyncio.Semaphore(self.max_concurrency),
        )
        prompt = {"model": name, "prompt": text, "add_special_tokens": False}
        reply = await endpoint.call("POST", "/tokenize", prompt, seconds=seconds)
        with reading(reply):
            theirs = reply["tokens"]
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        if theirs != ours:
            raise wrong_tokenizer(f"that splits {text[:50]!r} differently", f"{_KEY}.urls")
        await self._ask(server, ours[:4], ours[4:8], self._top_k or 0)
        return server

    def _needed_option(self) -> str:
        return "" if self._top_k is None else f" and --max-logprobs {self._top_k}"

    async def _read_rows(self, batch: TokenBatch) -> list[list[Any]]:
        """Return [c] logprobs of each row, or [c, K] ids and [c, K] logprobs."""
        rows = zip(batch.prompt_index, batch.completion_ids, batch.completion_mask, strict=True)
        return await gather_or_cancel(
            [
                self._read_row(
                    number,
                    batch.prompt_ids[index][batch.prompt_mask[index]].tolist(),
                    ids[mask].tolist(),
                )
                for number, (index, ids, mask) in enumerate(rows)
            ]
        )

    async def _read_row(
        self, number: int, prompt: Sequence[int], completion: Sequence[int]
    ) -> list[Any]:
        """Read one completion; the rows take turns with the servers.

        Raises:
            TeacherFailed: the server refuses the tokens, or fails for too long.
        """
        num_failures, first_failure = 0, 0.0
        while True:
            server = self._servers[(number + num_failures) % len(self._servers)]
            try:
                async with server.slots:
                    return await self._ask(server, prompt, completion, self._top_k or 0)
            except RequestRefused as error:
                raise TeacherFailed(
                    f"{self._failed(server)} refused a completion: {error}"
                ) from None
            except ServerError as error:
                num_failures += 1
                first_failure = first_failure or time.monotonic()
                seconds = time.monotonic() - first_failure
                if seconds >= self.give_up_after_seconds:
                    raise TeacherFailed(
                        f"{self._failed(server)} did not read a completion for {seconds:.0f} s: "
                        f"{in_words(error)}. Start it again and resume, or raise "
                        f"{_KEY}.give_up_after_seconds."
                    ) from None
                self._warn_once(server, error)
            await asyncio.sleep(backoff(num_failures, FIRST_BACKOFF, MAX_BACKOFF))

    def _failed(self, server: _Server) -> str:
        return f"the teacher's server at {server.endpoint.url}"

    def _warn_once(self, server: _Server, error: ServerError) -> None:
        """Log the first failure of a read."""
        if not self._is_failing:
            log.warning(
                "%s failed: %s. Asking again for up to %.0f s.",
                *(self._failed(server), in_words(error), self.give_up_after_seconds),
            )
        self._is_failing = True

    async def _ask(
        self, server: _Server, prompt: Sequence[int], completion: Sequence[int], num_likely: int
    ) -> list[Any]:
        """Send one request; return the values of each completion token.

        A teacher may have more tokens than the policy. Where one of them is among the likeliest,
        twice as many are asked for.

        Args:
            num_likely: Number of most likely tokens to ask for at each place.
        """
        body = {
            "model": server.model,
            "prompt": [*prompt, *completion],
            "prompt_logprobs": num_likely,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        reply = await server.endpoint.call(
            "POST", "/v1/completions", body, seconds=self.request_timeout
        )
        with reading(reply):
            entries = reply["choices"][0]["prompt_logprobs"][len(prompt) :]
            if len(entries) != len(completion):
                raise ValueError(f"{len(entries)} logprobs for {len(completion)} tokens")
            if self._top_k is None:
                pairs = zip(entries, completion, strict=True)
                return [[_logprob(entry[str(token)]) for entry, token in pairs]]
            found = [_most_likely(entry, self._top_k, self._vocab_size) for entry in entries]
        if all(len(ids) == self._top_k for ids, _ in found):
            return [[ids for ids, _ in found], [logprobs for _, logprobs in found]]
        return await self._ask(server, prompt, completion, 2 * num_likely)


def _most_likely(
    entry: Mapping[str, Mapping[str, float]], k: int, vocab_size: int
) -> tuple[list[int], list[float]]:
    """Return the ids and logprobs of the k most likely tokens of the policy's vocabulary.

    The server reports the token of the text as well.
    """
    known = [(int(id), _logprob(value)) for id, value in entry.items() if int(id) < vocab_size]
    known.sort(key=lambda pair: -pair[1])
    return [id for id, _ in known[:k]], [logprob for _, logprob in known[:k]]


def _logprob(value: Mapping[str, float]) -> float:
    """Return a logprob.

    Raises:
        ValueError: it is NaN.
    """
    logprob = float(value["logprob"])
    if math.isnan(logprob):
        raise ValueError("a logprob is NaN")
    return logprob
