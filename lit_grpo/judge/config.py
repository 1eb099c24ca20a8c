"""What a user says of a judge: which model answers, where, how it samples, what it may use up.

Secrets are named by the variables that hold them and never stand here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_grpo.types import UserError

Api = Literal["openai", "azure", "azure_v1"]
Auth = Literal["key", "token", "entra", "none"]
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
"""In capitals, as is usual: small letters tell keys such as ``hf_…`` from names."""
ReplyFormat = Literal["auto", "schema", "text"]


@dataclass(frozen=True, kw_only=True)
class Price:
    """US dollars a million tokens; what is null costs nothing that is known.

    Args:
        prompt: Tokens read.
        cached_prompt: Tokens read that the server had in its cache; the price of ``prompt`` when
            null.
        completion: Tokens written, thoughts included.
    """

    prompt: float
    completion: float
    cached_prompt: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached_prompt"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise _refusal(f"price.{name}", ">= 0 dollars a million tokens", value)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be asked of a deployment, by the whole job: its processes share it evenly.

    Args:
        max_concurrency: Calls at a time.
        requests_per_minute: Calls within any 60 seconds; null for no limit.
        tokens_per_minute: Tokens read and written within any 60 seconds; null for no limit.
        max_cost_usd: When so much is spent the run stops with a checkpoint. Needs ``price``.
        call_timeout_seconds: For one HTTP request.
        deadline_seconds: For one question with all its waits and further calls.
        num_retries: Further calls for one question after failures that may pass.
    """

    max_concurrency: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_cost_usd: float | None = None
    call_timeout_seconds: float = 60.0
    deadline_seconds: float = 600.0
    num_retries: int = 5

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise _refusal("limits.max_concurrency", ">= 1", self.max_concurrency)
        if self.num_retries < 0:
            raise _refusal("limits.num_retries", ">= 0", self.num_retries)
        positive = ("requests_per_minute", "tokens_per_minute", "max_cost_usd")
        for name in (*positive, "call_timeout_seconds", "deadline_seconds"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise _refusal(f"limits.{name}", "positive", value)

    @property
    def shared(self) -> dict[str, float | None]:
        """Those that all who ask the deployment have in common."""
        names = ("max_concurrency", "requests_per_minute", "tokens_per_minute", "max_cost_usd")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A language model behind an API of OpenAI's form, and what it may use up.

    Args:
        model: Name of the model; of the deployment on Azure.
        api: ``openai`` for OpenAI and every compatible server, vLLM included; ``azure`` for
            Azure's deployment path, with an ``api_version``; ``azure_v1`` for Azure's v1 path.
        base_url: Where it answers; on Azure the resource, ``https://X.openai.azure.com``. When
            null ``OPENAI_BASE_URL``, on Azure ``AZURE_OPENAI_ENDPOINT`` or ``AZURE_API_BASE``.
        api_version: Of Azure's deployment path; when null ``OPENAI_API_VERSION`` or
            ``AZURE_API_VERSION``.
        auth: ``key``; ``token`` for an Entra token in a variable; ``entra`` for one that
            azure-identity fetches and renews; ``none`` for a server that asks for nothing.
        secret_variable: Name, in capitals, of the variable with the key or the token. When null
            ``OPENAI_API_KEY``, on Azure ``AZURE_OPENAI_API_KEY`` or ``AZURE_API_KEY``, and
            ``AZURE_OPENAI_AD_TOKEN`` for a token.
        temperature: Null leaves it out, as reasoning models need.
        max_completion_tokens: Longest reply, thoughts included: 16000 and more for a reasoning
            model.
        reply_format: ``schema`` demands a strict JSON schema of the server, ``text`` asks for JSON
            in words; ``auto`` demands the schema until the server refuses it.
        extra_body: Further fields of the request, as the server names them.
        limits: What it may use up.
        price: What tokens cost; null when they cost nothing or nobody counts.
        cache: Directory of verdicts that outlives the run and can be shared; null for none.
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
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.max_completion_tokens < 1:
            raise _refusal("max_completion_tokens", ">= 1", self.max_completion_tokens)
        if self.temperature is not None and self.temperature < 0:
            raise _refusal("temperature", ">= 0, or null", self.temperature)
        if self.secret_variable is not None and not VARIABLE.fullmatch(self.secret_variable):
            raise UserError(
                "secret_variable must be the name of an environment variable in capitals, such as "
                "OPENAI_API_KEY, got something else (a key itself would be saved with the config). "
                "Export the key and name its variable."
            )
        if self.limits.max_cost_usd is not None and self.price is None:
            raise UserError(
                "price must be given beside limits.max_cost_usd, got null (without prices nothing "
                "says what is spent). Set price.prompt and price.completion of the judge."
            )
        if self.auth == "entra" and self.api == "openai":
            raise UserError(
                "auth must be key, token or none with api: openai, got entra (azure-identity's "
                "tokens open Azure only). Set api to azure or azure_v1."
            )


def _refusal(name: str, rule: str, value: object) -> ValueError:
    return UserError(f"{name} must be {rule}, got {value}. Set {name} of the judge.")
