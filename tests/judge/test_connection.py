import asyncio
import json
import logging
import time
from dataclasses import asdict

import pytest
from judge_server import QUESTION, Reply, ask, says

from lit_grpo.judge import Judge
from lit_grpo.judge.client import JudgeClient
from lit_grpo.judge.connection import base_url, connect
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.types import UserError

VARIABLES = (
    *("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_API_VERSION"),
    *("AZURE_OPENAI_ENDPOINT", "AZURE_API_BASE", "AZURE_OPENAI_API_KEY", "AZURE_API_KEY"),
    *("AZURE_OPENAI_API_VERSION", "AZURE_API_VERSION", "AZURE_OPENAI_AD_TOKEN"),
    *("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID", "IDENTITY_ENDPOINT"),
)
DEPLOYMENT_PATH = "/openai/deployments/grader/chat/completions?api-version=2024-10-21"
V1_PATH = "/openai/v1/chat/completions"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Unset all variables; a test sets those that it needs."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def sent(server, **settings):
    """Ask a question and return its request."""
    (answer,) = ask(Judge(model="grader", **settings))
    assert not isinstance(answer, BaseException), repr(answer)
    (request,) = [one for one in server.requests if one.body]
    return request


def secrets(request):
    names = ("authorization", "api-key")
    return {name: request.headers[name] for name in names if name in request.headers}


AZURE = {"api": "azure", "api_version": "2024-10-21"}


def test_azures_deployment_path_takes_a_key_in_its_own_header(server, environment):
    environment("AZURE_OPENAI_API_KEY", "k")
    request = sent(server, base_url=server.url, **AZURE)
    assert request.path == DEPLOYMENT_PATH
    assert secrets(request) == {"api-key": "k"}
    assert request.body["model"] == "grader"


def test_azures_v1_path_has_no_version_and_takes_a_key_as_bearer(server, environment):
    environment("AZURE_OPENAI_API_KEY", "k")
    request = sent(server, base_url=server.url, api="azure_v1")
    assert request.path == V1_PATH
    assert secrets(request) == {"authorization": "Bearer k"}


@pytest.mark.parametrize(("api", "path"), [("azure", DEPLOYMENT_PATH), ("azure_v1", V1_PATH)])
def test_an_entra_token_is_a_bearer_on_either_path(server, environment, api, path):
    environment("AZURE_OPENAI_AD_TOKEN", "t")
    settings = AZURE | {"api": api, "auth": "token"}
    request = sent(server, base_url=server.url, **settings)
    assert request.path == path
    assert secrets(request) == {"authorization": "Bearer t"}


@pytest.mark.parametrize("ending", ["", "/", "/openai", "/openai/", "/openai/v1", "/openai/v1/"])
@pytest.mark.parametrize("api", ["azure", "azure_v1"])
def test_the_address_of_the_resource_may_include_the_path(api, ending):
    judge = Judge(model="m", api=api, base_url=f"https://name.openai.azure.com{ending}")
    assert base_url(judge) == "https://name.openai.azure.com"


@pytest.mark.parametrize(
    ("url", "key", "version"),
    [
        ("AZURE_OPENAI_ENDPOINT", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_API_VERSION"),
        ("AZURE_API_BASE", "AZURE_API_KEY", "AZURE_API_VERSION"),
        ("AZURE_OPENAI_ENDPOINT", "AZURE_API_KEY", "OPENAI_API_VERSION"),
    ],
)
def test_every_spelling_of_azures_variables_is_read(server, environment, url, key, version):
    environment(url, server.url)
    environment(key, "k")
    environment(version, "2024-10-21")
    request = sent(server, api="azure")
    assert request.path == DEPLOYMENT_PATH
    assert secrets(request) == {"api-key": "k"}


@pytest.mark.parametrize("api", ["azure", "azure_v1"])
@pytest.mark.parametrize("auth", ["key", "token"])
def test_of_a_key_and_a_token_the_configured_one_is_sent(server, environment, api, auth):
    environment("AZURE_OPENAI_API_KEY", "k")
    environment("AZURE_OPENAI_AD_TOKEN", "t")
    request = sent(server, base_url=server.url, **(AZURE | {"api": api, "auth": auth}))
    name = "api-key" if (api, auth) == ("azure", "key") else "authorization"
    value = "k" if auth == "key" else "t"
    assert secrets(request) == {name: value if name == "api-key" else f"Bearer {value}"}


def test_openais_variables_are_read(server, environment):
    environment("OPENAI_BASE_URL", f"{server.url}/v1/")
    environment("OPENAI_API_KEY", "k")
    request = sent(server)
    assert request.path == "/v1/chat/completions"
    assert secrets(request) == {"authorization": "Bearer k"}


@pytest.mark.parametrize("path", ["/v1", "/openai/v1", "/groq/openai/v1", "/openai"])
def test_the_path_of_a_compatible_server_is_left_as_it_is(server, path):
    request = sent(server, base_url=server.url + path, auth="none")
    assert request.path == f"{path}/chat/completions"


def test_the_config_takes_precedence_over_the_variables(server, environment):
    environment("AZURE_OPENAI_ENDPOINT", "http://127.0.0.1:9")
    environment("AZURE_OPENAI_API_KEY", "other")
    environment("OPENAI_API_VERSION", "1999-01-01")
    environment("MINE", "k")
    request = sent(server, base_url=server.url, secret_variable="MINE", **AZURE)
    assert request.path == DEPLOYMENT_PATH
    assert secrets(request) == {"api-key": "k"}


def test_openai_is_the_default_server():
    assert base_url(Judge(model="m")) == "https://api.openai.com/v1"


# azure-identity with a real request: the managed identity of an App Service


def as_app_service(server, environment):
    environment("IDENTITY_ENDPOINT", f"{server.url}/msi/token")
    environment("IDENTITY_HEADER", "proof")
    environment("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
    token = {"access_token": "t", "token_type": "Bearer", "resource": "r"}
    token |= {"expires_on": str(int(time.time()) + 3600)}
    server.behaviour = lambda request: says(score=10) if request.body else Reply(token)


@pytest.mark.parametrize(("api", "path"), [("azure", DEPLOYMENT_PATH), ("azure_v1", V1_PATH)])
def test_entra_signs_in_through_azure_identity(server, environment, api, path):
    as_app_service(server, environment)
    environment("AZURE_OPENAI_API_KEY", "k")
    environment("AZURE_OPENAI_AD_TOKEN", "stale")
    request = sent(server, base_url=server.url, **(AZURE | {"api": api, "auth": "entra"}))
    assert request.path == path
    assert secrets(request) == {"authorization": "Bearer t"}
    (sign_in,) = [one for one in server.requests if not one.body]
    assert sign_in.headers["x-identity-header"] == "proof"
    assert sign_in.path.endswith("resource=https://cognitiveservices.azure.com")


def test_one_sign_in_serves_many_questions(server, environment):
    as_app_service(server, environment)
    judge = Judge(model="grader", base_url=server.url, api="azure_v1", auth="entra")
    answers = ask(judge, *[QUESTION] * 4)
    assert not any(isinstance(one, BaseException) for one in answers)
    assert len([one for one in server.requests if one.body]) == 4
    # Parallel questions may each find that there is no token yet.
    assert 1 <= len([one for one in server.requests if not one.body]) <= 4


def test_a_missing_identity_is_an_error_at_the_start(server, environment):
    environment("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")
    judge = Judge(model="grader", base_url=server.url, api="azure_v1", auth="entra")

    async def run():
        client = JudgeClient(judge)
        try:
            await client.check_access()
        finally:
            await client.close()

    with pytest.raises(ValueError, match=r"(?s)no Entra token.*auth \(entra\)"):
        asyncio.run(run())
    assert not server.requests


# Missing settings


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "OPENAI_API_KEY.*auth to none"),
        ({"api": "azure_v1", "auth": "none"}, "neither AZURE_OPENAI_ENDPOINT nor AZURE_API_BASE"),
        ({"api": "azure", "base_url": "http://x"}, "AZURE_OPENAI_API_KEY or AZURE_API_KEY.*entra"),
        ({"api": "azure", "base_url": "http://x", "auth": "token"}, "AZURE_OPENAI_AD_TOKEN"),
        ({"secret_variable": "MINE"}, "the environment variable MINE, which is not set"),
    ],
)
def test_a_missing_setting_is_named(settings, advice):
    with pytest.raises(ValueError, match=advice):
        connect(Judge(model="m", **settings))


def test_the_error_for_a_missing_key_names_a_token_that_is_set(environment):
    environment("AZURE_OPENAI_AD_TOKEN", "t")
    with pytest.raises(ValueError, match="AZURE_OPENAI_AD_TOKEN is set, which auth: token uses"):
        connect(Judge(model="m", api="azure", base_url="http://x"))


def test_the_deployment_path_needs_a_version(environment):
    environment("AZURE_API_KEY", "k")
    with pytest.raises(ValueError, match="api_version must be set.*or use api: azure_v1"):
        connect(Judge(model="m", api="azure", base_url="http://x"))


def test_an_empty_variable_counts_as_unset(environment):
    environment("OPENAI_API_KEY", "")
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        connect(Judge(model="m"))


@pytest.mark.parametrize("api", ["openai", "azure", "azure_v1"])
def test_a_secret_is_never_shown(server, environment, api, caplog):
    environment("MINE", "hush-hush")
    judge = Judge(
        model="m",
        api=api,
        api_version="1",
        base_url=server.url,
        secret_variable="MINE",
    )
    with caplog.at_level(logging.DEBUG):
        client = JudgeClient(judge)
        (answer,) = ask(judge)
    texts = [caplog.text, repr(judge), json.dumps(asdict(judge), default=str)]
    texts += [repr(client), str(vars(client)), repr(client._client), repr(answer)]
    asyncio.run(client.close())
    assert not isinstance(answer, JudgeFailure)
    assert not any("hush-hush" in text for text in texts)


@pytest.mark.parametrize("url", ["localhost:8000/v1", "127.0.0.1:8000", "ftp://judge", "http://"])
def test_an_address_that_is_none_of_http_is_refused(url):
    with pytest.raises(UserError, match="base_url must be an address with http:// or https://"):
        base_url(Judge(model="m", base_url=url))
