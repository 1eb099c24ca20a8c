"""Create the client of the openai package from a judge's config and the environment.

Both spellings of Azure's variables are read. Secrets are never printed, logged or saved.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from lit_grpo.judge.config import Api, Auth, Judge
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.types import Outcome, UserError, setting_error
from lit_grpo.types.settings import is_http_address

if TYPE_CHECKING:
    from openai import AsyncOpenAI

ENTRA_SCOPE = "https://cognitiveservices.azure.com/.default"

AZURE_URLS = ("AZURE_OPENAI_ENDPOINT", "AZURE_API_BASE")
URL_VARIABLES: dict[Api, tuple[str, ...]] = {
    "openai": ("OPENAI_BASE_URL",),
    "azure": AZURE_URLS,
    "azure_v1": AZURE_URLS,
}
AZURE_KEYS = ("AZURE_OPENAI_API_KEY", "AZURE_API_KEY")
KEY_VARIABLES: dict[Api, tuple[str, ...]] = {
    "openai": ("OPENAI_API_KEY",),
    "azure": AZURE_KEYS,
    "azure_v1": AZURE_KEYS,
}
TOKEN_VARIABLES = ("AZURE_OPENAI_AD_TOKEN",)
VERSION_VARIABLES = ("OPENAI_API_VERSION", "AZURE_OPENAI_API_VERSION", "AZURE_API_VERSION")
OPENAI_URL = "https://api.openai.com/v1"
SHORTEST_SECRET = 8
"""Shorter values are placeholders such as ``x``, for servers that ignore the key."""

Secret = str | Callable[[], Awaitable[str]]


def connect(judge: Judge) -> AsyncOpenAI:
    """Return a client that does not retry by itself, for use on a single event loop.

    Raises:
        UserError: an address, a secret or a package is missing.
    """
    try:
        import openai
    except ModuleNotFoundError:
        raise _missing_package("openai", "judge") from None
    secret, url = _secret(judge), base_url(judge)
    if judge.api == "azure":
        by_key = isinstance(secret, str) and judge.auth == "key"
        return openai.AsyncAzureOpenAI(
            base_url=f"{url}/openai/deployments/{judge.model}",
            api_version=_api_version(judge),
            api_key=secret if by_key else None,
            azure_ad_token_provider=None if by_key else _as_provider(secret),
            max_retries=0,
        )
    return openai.AsyncOpenAI(
        base_url=f"{url}/openai/v1" if judge.api == "azure_v1" else url,
        api_key=secret,
        max_retries=0,
    )


def base_url(judge: Judge) -> str:
    """Return the address of the server; on Azure without its path.

    Raises:
        UserError: neither the config nor a variable gives an address, or it is not one of http.
    """
    found = judge.base_url or _first_set(URL_VARIABLES[judge.api])
    if found and not is_http_address(found):
        raise setting_error(
            "judge.base_url",
            "an address with http:// or https://, such as http://localhost:8000/v1",
            repr(found),
            "no request could be sent to it",
        )
    if judge.api == "openai":
        return (found or OPENAI_URL).rstrip("/")
    if found:
        return found.rstrip("/").removesuffix("/openai/v1").removesuffix("/openai")
    raise UserError(
        "judge.base_url must be set to the address of the resource, "
        f"https://NAME.openai.azure.com: it is null, and {_none_of(AZURE_URLS)} is set. Set one of "
        "them."
    )


def _secret(judge: Judge) -> Secret:
    if judge.auth == "entra":
        return _entra_provider()
    if judge.auth == "none":
        return "none"
    variables = secret_variables(judge)
    secret = _first_set(variables)
    if secret is None:
        raise UserError(
            f"the judge's {judge.auth} must be in the environment variable {_or(variables)}, "
            f"which {'is' if len(variables) == 1 else 'are'} not set in this process. Export it, "
            "or name a different one with judge.secret_variable"
            f"{_alternative(judge.api, judge.auth)}."
        )
    return secret


def secret_variables(judge: Judge) -> tuple[str, ...]:
    """Return the variables that may hold the key or token; the first one that is set is used."""
    if judge.secret_variable is not None:
        return (judge.secret_variable,)
    return KEY_VARIABLES[judge.api] if judge.auth == "key" else TOKEN_VARIABLES


def without_secret(text: str, judge: Judge) -> str:
    """Replace the key or token in a server's message, which may repeat what it was sent."""
    secret = _first_set(secret_variables(judge)) or ""
    is_placeholder = len(secret) < SHORTEST_SECRET
    return text if is_placeholder else text.replace(secret, "[secret]")


def _alternative(api: Api, auth: Auth) -> str:
    if api == "openai":
        return "; set auth to none for a server that needs no key"
    if auth == "key" and _first_set(TOKEN_VARIABLES):
        return f"; {TOKEN_VARIABLES[0]} is set, which auth: token uses"
    return "; auth: entra signs in through azure-identity"


def _entra_provider() -> Callable[[], Awaitable[str]]:
    try:
        from azure.core.exceptions import ClientAuthenticationError
        from azure.identity import DefaultAzureCredential, get_bearer_token_provider
    except ModuleNotFoundError:
        raise _missing_package("azure-identity", "azure") from None
    # The synchronous version in a thread: the async one has a session that must be closed.
    fetch = get_bearer_token_provider(DefaultAzureCredential(), ENTRA_SCOPE)

    async def provide() -> str:
        try:
            return await asyncio.to_thread(fetch)
        except ClientAuthenticationError as error:
            raise JudgeFailure(Outcome.ERROR, f"no Entra token: {error}", status=401) from None

    return provide


def _as_provider(secret: Secret) -> Callable[[], Awaitable[str]]:
    if not isinstance(secret, str):
        return secret

    async def provide() -> str:
        return secret

    return provide


def _api_version(judge: Judge) -> str:
    version = judge.api_version or _first_set(VERSION_VARIABLES)
    if version is None:
        raise UserError(
            "judge.api_version must be set with api: azure: it is null, and "
            f"{_none_of(VERSION_VARIABLES)} is set (the path contains a version such as "
            "2024-10-21). Set judge.api_version, or use api: azure_v1, which has none."
        )
    return version


def _first_set(variables: tuple[str, ...]) -> str | None:
    return next((value for name in variables if (value := os.environ.get(name))), None)


def _or(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def _none_of(names: tuple[str, ...]) -> str:
    return f"neither {' nor '.join(names)}"


def _missing_package(package: str, extra: str) -> UserError:
    return UserError(
        f"this judge needs the package {package}, which is not installed. "
        f"Install it with: pip install 'lit-grpo[{extra}]'."
    )
