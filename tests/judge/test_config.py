import traceback

import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_grpo.judge import Judge, Limits, Price


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_concurrency": 0}, "limits.max_concurrency"),
        ({"num_retries": -1}, "limits.num_retries"),
        ({"requests_per_minute": 0}, "limits.requests_per_minute"),
        ({"tokens_per_minute": -5}, "limits.tokens_per_minute"),
        ({"max_cost_usd": 0}, "limits.max_cost_usd"),
        ({"call_timeout_seconds": 0}, "limits.call_timeout_seconds"),
        ({"deadline_seconds": -1}, "limits.deadline_seconds"),
    ],
)
def test_limits_that_allow_nothing_are_refused(settings, name):
    with pytest.raises(ValueError, match=f"{name} must be .* got .* Set judge.{name}"):
        Limits(**settings)


@pytest.mark.parametrize("name", ["prompt", "completion", "cached_prompt"])
def test_a_price_below_zero_is_refused(name):
    with pytest.raises(ValueError, match=f"price.{name} must be >= 0"):
        Price(**{"prompt": 1.0, "completion": 1.0, name: -1.0})


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens must be >= 1"),
        ({"temperature": -0.1}, "temperature must be >= 0"),
        ({"limits": Limits(max_cost_usd=1)}, "price must be given with judge.limits.max_cost_usd"),
        ({"auth": "entra"}, "auth must be key, token or none with api: openai"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        Judge(model="m", **settings)


KEYS = {
    "OpenAI's": "sk-proj-abcDEF012_ghiJKL345",
    "Hugging Face's": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    "Azure's": "b1946ac92492d2347c6235b4d2611184",
    "Azure's later ones": "Ab1" * 28,
    "in capitals": "AB1" * 28,
    "a token": "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJncmFkZXIifQ.c2lnbmF0dXJl",
    "with its scheme": "Bearer abcdef",
    "the variable's value": "$OPENAI_API_KEY",
    "empty": "",
    "with a line break": "OPENAI_API_KEY\n",
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_in_place_of_its_variable_is_refused_and_not_shown(key, tmp_path, capsys):
    with pytest.raises(ValueError, match="secret_variable must be the name of an env") as caught:
        Judge(model="m", secret_variable=key)
    shown = "".join(traceback.format_exception(caught.value))
    try:
        from_yaml(tmp_path, {"model": "m", "secret_variable": key})
    except (SystemExit, ValueError) as error:
        shown += f"{error!r}{error.__cause__!r}"
    shown += "".join(capsys.readouterr())
    assert key.strip("$\n") in ("", "OPENAI_API_KEY") or key not in shown


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "MY_KEY_2", "_KEY", "K"])
def test_the_name_of_a_variable_is_taken(name):
    assert Judge(model="m", secret_variable=name).secret_variable == name


def test_extra_body_is_null_by_default_and_may_be_null_in_a_config(tmp_path):
    assert Judge(model="m").extra_body is None
    for given, read in ((None, None), ({}, {}), ({"seed": 1}, {"seed": 1})):
        assert from_yaml(tmp_path, {"model": "m", "extra_body": given}).extra_body == read
    parser = judge_parser()
    saved = parser.dump(parser.parse_args(["--judge.model=m"]), skip_none=False)
    assert yaml.safe_load(saved)["judge"]["extra_body"] is None


def judge_parser():
    parser = ArgumentParser()
    parser.add_class_arguments(Judge, "judge")
    parser.add_argument("--config", action="config")
    return parser


def from_yaml(folder, settings):
    file = folder / "judge.yaml"
    file.write_text(yaml.safe_dump({"judge": settings}))
    parser = judge_parser()
    return parser.instantiate_classes(parser.parse_args([f"--config={file}"])).judge


def test_a_judge_is_read_from_yaml_with_all_its_parts(tmp_path):
    settings = {
        "model": "grader",
        "api": "azure_v1",
        "auth": "entra",
        "temperature": None,
        "limits": {"requests_per_minute": 60, "max_cost_usd": 5},
        "price": {"prompt": 2, "completion": 8},
        "cache": str(tmp_path),
        "extra_body": {"reasoning_effort": "low"},
    }
    assert from_yaml(tmp_path, settings) == Judge(
        model="grader",
        api="azure_v1",
        auth="entra",
        temperature=None,
        limits=Limits(requests_per_minute=60, max_cost_usd=5),
        price=Price(prompt=2, completion=8),
        cache=str(tmp_path),
        extra_body={"reasoning_effort": "low"},
    )
