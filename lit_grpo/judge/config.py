"""The configuration of a judge: its model, address, sampling and limits.

It names the environment variables that hold secrets, never the secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords

Api = Literal["openai", "azure", "azure_v1"]
Auth = Literal["key", "token", "entra", "none"]
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
"""Capitals only, so a key such as ``hf_…`` does not pass for a name."""
ReplyFormat = Literal["auto", "schema", "text"]


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Price:
    """Prices in US dollars per million tokens.

    Args:
        prompt: Price of prompt tokens.
        cached_prompt: Price of prompt tokens that the server had in its cache; null for the price
            of ``prompt``.
        completion: Price of completion tokens, reasoning included.
    """

    prompt: float
    completion: float
    cached_prompt: float | None = None

    def __post_init__(self) -> None:
        check_fields("judge.price", self)
        for name in ("prompt", "completion", "cached_prompt"):
            check_range(f"judge.price.{name}", getattr(self, name), at_least=0)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the requests to one deployment.

    They hold for the whole job: each process gets an equal share.

    Args:
        max_concurrency: Requests in flight at a time.
        requests_per_minute: Requests within any 60 seconds; null for no limit.
        tokens_per_minute: Prompt and completion tokens within any 60 seconds; null for no limit.
        max_cost_usd: When this much is spent, the run stops with a checkpoint; null for no limit.
            Needs ``price``.
        call_timeout_seconds: Timeout of one HTTP request.
        deadline_seconds: Timeout of one question, with all its waits and retries.
        num_retries: Retries of one question after transient failures.
    """

    max_concurrency: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_cost_usd: float | None = None
    call_timeout_seconds: float = 60.0
    deadline_seconds: float = 600.0
    num_retries: int = 5

    def __post_init__(self) -> None:
        check_fields("judge.limits", self)
        check_range("judge.limits.max_concurrency", self.max_concurrency, at_least=1)
        check_range("judge.limits.num_retries", self.num_retries, at_least=0)
        positive = ("requests_per_minute", "tokens_per_minute", "max_cost_usd")
        for name in (*positive, "call_timeout_seconds", "deadline_seconds"):
            check_range(f"judge.limits.{name}", getattr(self, name), above=0)

    @property
    def shared(self) -> dict[str, float | None]:
        """The limits of the deployment itself, which all its clients must agree on."""
        names = ("max_concurrency", "requests_per_minute", "tokens_per_minute", "max_cost_usd")
        return {name: getattr(self, name) for name in names}


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Judge:
    """A language model behind an OpenAI-compatible API.

    Args:
        model: Name of the model; on Azure, of the deployment.
        api: ``openai`` for OpenAI and every compatible server, vLLM included; ``azure`` for
            Azure's deployment path, with an ``api_version``; ``azure_v1`` for Azure's v1 path.
        base_url: Address of the server; on Azure of the resource, ``https://X.openai.azure.com``.
            When null, ``OPENAI_BASE_URL``, on Azure ``AZURE_OPENAI_ENDPOINT`` or
            ``AZURE_API_BASE``.
        api_version: Version of Azure's deployment path; when null, ``OPENAI_API_VERSION`` or
            ``AZURE_API_VERSION``.
        auth: ``key`` for an API key; ``token`` for an Entra token in a variable; ``entra`` for a
            token that azure-identity fetches and renews; ``none`` for a server without
            authentication.
        secret_variable: Name, in capitals, of the environment variable with the key or the token.
            When null, ``OPENAI_API_KEY``, on Azure ``AZURE_OPENAI_API_KEY`` or ``AZURE_API_KEY``,
            and ``AZURE_OPENAI_AD_TOKEN`` for a token.
        temperature: Sampling temperature; null omits it, as reasoning models require.
        max_completion_tokens: Maximum length of a reply, reasoning included: 16000 or more for a
            reasoning model.
        reply_format: ``schema`` sends a strict JSON schema with each request; ``text`` describes
            the JSON in the prompt; ``auto`` sends the schema until the server rejects it.
        extra_body: Further fields of the request body.
        limits: Limits on requests, tokens and cost.
        price: Prices of tokens; null counts no cost.
        cache: Directory of a cache of verdicts, which later and parallel runs can share; null for
            none.
    """

    model: str
    api: Api = "openai"
    base_url: str | None = None
    api_version: str | None = None
    auth: Auth = "key"
    secret_variable: str | None = None
    temperature: float | None = 0.0
    max_completion_tokens: int = 1024
    reply_format: ReplyFormat = "auto"
    extra_body: Mapping[str, Any] | None = None
    limits: Limits = Limits()
    price: Price | None = None
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        check_fields("judge", self)
        check_range("judge.max_completion_tokens", self.max_completion_tokens, at_least=1)
        check_range("judge.temperature", self.temperature, at_least=0)
        if self.secret_variable is not None and not VARIABLE.fullmatch(self.secret_variable):
            # The value is not shown: it may be a key.
            raise UserError(
                "secret_variable must be the name of an environment variable in capitals, such as "
                "OPENAI_API_KEY, got something else (a key itself would be saved with the config). "
                "Export the key and name its variable."
            )
        if self.limits.max_cost_usd is not None and self.price is None:
            raise UserError(
                "judge.price must be given with judge.limits.max_cost_usd, got null (without "
                "prices the cost is not known). Set judge.price.prompt and judge.price.completion."
            )
        if self.auth == "entra" and self.api == "openai":
            raise UserError(
                "judge.auth must be key, token or none with api: openai, got entra "
                "(azure-identity's tokens are for Azure only). Set judge.api to azure or azure_v1."
            )

    def check_votes(self, key: str, votes: int) -> None:
        """Raise UserError if several votes on one question would all be equal.

        Args:
            key: Key of the setting with the number of votes.
            votes: Their number.
        """
        if votes > 1 and self.temperature == 0:
            why = "all votes would be equal; or set judge.temperature above 0 or to null"
            raise setting_error(key, "1 with a temperature of 0", votes, why)
