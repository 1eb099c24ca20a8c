"""``lit-grpo judge-check`` against judges on real sockets: good, blind and unreachable ones."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from judge_server import JudgeServer, Reply, Request, Section, judges, refuses, writes
from terminal import shown_in_terminal
from tiny import prompt

from lit_grpo.__main__ import main
from lit_grpo.cli.rewards.judge_check import assess, gold_pairs, told_apart
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.types import Outcome, Score


def grader(grade):
    """A judge that gives each answer the grade of a rule."""
    return judges("answer", lambda request, one: {"score": grade(request, one)})


def by_reference(request: Request, one: Section) -> int:
    (reference,) = request.of("reference")
    return 10 if one.text == reference.text else 1


def check(server: JudgeServer, **settings) -> int:
    write_config(server, **settings)
    return main(["judge-check", "--config=my.yaml"])


def write_config(
    server: JudgeServer, *, kind="JudgeReward", data=None, model=None, only_sources=None, **judge
) -> None:
    asked = {"model": "gpt-x", "base_url": f"{server.url}/v1", "auth": "none"} | judge
    settings = {"judge": asked, "only_sources": only_sources}
    reward = {"class_path": kind, "init_args": settings}
    settings = BASE["model"] | {"rewards": ["MathReward", reward]} | (model or {})
    config = BASE | {"model": settings} | (data or {})
    Path("my.yaml").write_text(yaml.safe_dump(config))


def rows(*lines: str) -> dict:
    Path("rows.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"train": "rows.jsonl", "require_answer": False, "prompts_per_step": 1}
    return {"data": {"class_path": "PromptData", "init_args": settings}}


def test_a_judge_that_knows_the_gold_answer_passes(capsys):
    with JudgeServer(grader(by_reference)) as server:
        assert check(server, price={"prompt": 1.0, "completion": 10.0}) == 0
        assert len(server.requests) == 1 + 2 * 4
        place = f"model gpt-x at {server.url}/v1, api openai, auth none"
    shown = capsys.readouterr().out
    assert place in shown
    assert shown.count("told apart") == 4
    assert "pairs: calls 8, latency" in shown
    assert "800 tokens read and 80 written, 0.0016 dollars" in shown
    assert shown.endswith(
        "The good answer scored higher in 4 of 4 pairs: the judge tells good from bad, as far as "
        "so few pairs can show.\n"
    )
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_answers_are_cut_and_verdicts_are_not_in_a_terminal(here, columns, importer):
    lines = [f'{{"prompt": "{"why " * 30}{n}?", "answer": "{"so " * 30}{n}"}}' for n in range(4)]
    with JudgeServer(grader(by_reference)) as server:
        write_config(server, data=rows(*lines))
        shown = shown_in_terminal(
            importer, "judge-check", "--config=my.yaml", cwd=here, columns=columns
        )
    start = next(n for n, line in enumerate(shown) if line.startswith("question"))
    assert shown[start].split()[-3:] == ["good", "bad", "verdict"]
    for row in shown[start + 1 : start + 5]:
        assert re.fullmatch(r"….*\d\? +….*so \d +….*so \d +1 +0\.1 +told apart *", row)
        assert len(row) <= columns


def test_a_judge_of_some_sources_is_asked_about_their_rows_only(capsys):
    """The essays have no gold answers, so that it is asked about obvious ones."""
    for name, answers in (("sums", ["1", "2", "3", "4"]), ("essays", [None] * 4)):
        lines = [json.dumps({"prompt": f"{name} {n}", "answer": a}) for n, a in enumerate(answers)]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sources = {
        name: {"data": {"class_path": "PromptData", "init_args": settings}}
        for name in ("sums", "essays")
        for settings in [{"train": f"{name}.jsonl", "require_answer": False}]
    }
    data = {"class_path": "MixtureData", "init_args": {"sources": sources, "prompts_per_step": 2}}
    for only, asked in (("sums", "sums 0"), ("essays", "capital of France")):
        with JudgeServer(grader(lambda request, one: 5)) as server:
            write_config(server, data={"data": data}, only_sources=[only])
            assert main(["judge-check", "--config=my.yaml"]) == 1
        shown = capsys.readouterr().out
        assert "in 0 of 4 pairs" in shown
        assert asked in shown


def test_a_blind_judge_fails_with_exit_code_1(capsys):
    with JudgeServer(grader(lambda request, one: 7)) as server:
        assert check(server) == 1
    shown = capsys.readouterr().out
    assert shown.count("not told apart") == 4
    assert "scored higher in 0 of 4 pairs, and 75% are required" in shown


def test_a_ranking_judge_is_asked_for_an_order(capsys):
    def behave(request):
        (reference,) = request.of("reference")
        shown = {one.id: one.text for one in request.of("answer")}
        order = sorted(shown, key=lambda label: shown[label] != reference.text)
        labels = [label.split()[-1] for label in order]
        return writes(f'{{"explanation": "", "order": {labels}}}'.replace("'", '"'))

    with JudgeServer(behave) as server:
        assert check(server, kind="RankingReward") == 0
    assert "in 4 of 4 pairs" in capsys.readouterr().out


def test_judges_of_held_out_accuracy_and_those_that_only_monitor_are_checked_too(capsys):
    with JudgeServer(grader(by_reference)) as server:
        judge = {"base_url": f"{server.url}/v1", "auth": "none"}
        accuracy, monitor = (
            {"class_path": "JudgeReward", "init_args": {"judge": judge | {"model": name}, **more}}
            for name, more in (("other", {}), ("watching", {"weight": 0.0, "on_error": "raise"}))
        )
        model = {"evaluation": {"accuracy": accuracy}, "rewards": ["MathReward", monitor]}
        assert check(server, model=model) == 0
    shown = capsys.readouterr().out
    assert "model other at" in shown
    assert "model watching at" in shown


def test_a_refused_key_is_one_line_with_what_to_set_and_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-very-secret-indeed")
    with JudgeServer() as server:
        server.script(refuses(401, "bad key sk-very-secret-indeed"))
        assert check(server, auth="key", secret_variable="MY_KEY") == 2
    shown = capsys.readouterr()
    assert "auth key from MY_KEY" in shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith("error: the judge did not accept a test question")
    assert "Check model, base_url, api (openai) or the key in MY_KEY." in line
    assert "very-secret" not in shown.out + shown.err


def test_a_key_in_the_config_is_refused_and_not_printed(capsys):
    with JudgeServer(grader(by_reference)) as server:
        assert check(server, auth="key", secret_variable="hf_VerySecretIndeed0123456789") == 2
        assert not server.requests
    shown = capsys.readouterr()
    assert "secret_variable must be the name of an environment variable" in shown.err
    assert "VerySecret" not in shown.out + shown.err


def test_a_judge_that_is_down_cannot_be_asked(capsys):
    with JudgeServer(lambda request: refuses(503, "down")) as server:
        server.script(refuses(503, "down"))
        assert check(server, limits={"num_retries": 0}) == 2
    shown = capsys.readouterr().out
    assert "The judge scored no pair: unavailable" in shown
    assert "Check that its service runs and can be reached." in shown


def test_a_judge_whose_replies_have_another_format_is_not_said_to_be_out_of_reach(capsys):
    with JudgeServer(lambda request: writes("Good: 8 of 10")) as server:
        assert check(server, limits={"num_retries": 0}) == 2
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith(
        "The judge scored no pair: parse_error: the reply has no JSON object with 'explanation', "
        "'score'"
    )
    assert verdict.endswith("Good: 8 of 10'. Compare its prompt with its replies.")


def test_the_cache_of_the_judge_is_bypassed(here):
    with JudgeServer(grader(by_reference)) as server:
        for _ in range(2):
            assert check(server, cache=str(here / "cache")) == 0
        assert len(server.requests) == 2 * 9


def test_rows_without_gold_answers_are_replaced_by_obvious_pairs(capsys):
    def obvious(request, one):
        return 10 if one.text in ("Paris", "42", "An elephant.", "Red") else 0

    with JudgeServer(grader(obvious)) as server:
        assert check(server, data=rows('{"prompt": "Write a poem."}')) == 0
    assert "What is the capital of France?" in capsys.readouterr().out


def test_a_rubric_without_gold_answers_has_its_access_checked_only(capsys):
    rubric = rows('{"prompt": "Greet me.", "rubric": [{"criterion": "Polite.", "points": 1}]}')
    with JudgeServer() as server:
        assert check(server, kind="RubricReward", data=rubric) == 0
        assert len(server.requests) == 1
    assert "RubricReward depends on columns of the data" in capsys.readouterr().out


def test_rewards_by_rubric_alignment_have_their_access_checked_only(capsys):
    with JudgeServer() as server:
        assert check(server, kind="RubricAlignmentReward") == 0
        assert len(server.requests) == 1
    assert "Only access was checked" in capsys.readouterr().out


def test_the_policy_s_weights_are_not_needed(here):
    byte_tokenizer().save_pretrained(here / "tokenizer")
    with JudgeServer(grader(by_reference)) as server:
        assert check(server, model={"policy": {"path": str(here / "tokenizer")}}) == 0


def test_a_config_without_a_judge_is_one_line(capsys):
    Path("my.yaml").write_text(yaml.safe_dump(BASE))
    assert main(["judge-check", "--config=my.yaml"]) == 2
    assert re.fullmatch(r"error: judge-check needs a reward .*\n", capsys.readouterr().err)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_check_with_130(capsys):
    questions = itertools.count()

    def interrupt(request):
        if next(questions) == 0:  # others may be asked at the same time
            os.kill(os.getpid(), signal.SIGINT)
        return Reply({}, seconds=600)

    with JudgeServer(interrupt) as server:
        assert check(server) == 130
    assert capsys.readouterr().err == "error: interrupted.\n"


def test_a_bad_answer_is_the_next_gold_answer_that_differs():
    answers = {"a": "Yes", "b": "yes ", "c": "No", "d": None}
    prompts = [prompt(id=id, answer=answer) for id, answer in answers.items()]
    pairs = [(pair.prompt.id, pair.good, pair.bad) for pair in gold_pairs(prompts)]
    assert pairs == [("a", "Yes", "No"), ("b", "yes ", "No"), ("c", "No", "Yes")]
    assert list(gold_pairs(prompts[:2])) == []


def scored(value: float | None) -> Score:
    return Score(value=value, outcome=Outcome.ERROR if value is None else Outcome.OK)


def pair(good: float | None, bad: float | None) -> tuple[Score, Score]:
    return scored(good), scored(bad)


@pytest.mark.parametrize(
    ("good", "bad", "verdict"),
    [(1.0, 0.0, True), (0.5, 0.5, False), (0.0, 1.0, False), (None, 0.0, None), (1.0, None, None)],
)
def test_a_failure_gives_no_verdict_and_a_tie_is_not_a_success(good, bad, verdict):
    assert told_apart(*pair(good, bad)) is verdict


def test_three_of_four_scored_pairs_are_enough_and_two_are_not():
    right, wrong, absent = pair(1.0, 0.0), pair(0.0, 1.0), pair(None, 0.0)
    exit_code, words = assess([right, right, right, wrong])
    assert (exit_code, words.split(":")[0]) == (
        0,
        "The good answer scored higher in 3 of 4 pairs",
    )
    assert assess([right, right, wrong, wrong])[0] == 1
    exit_code, words = assess([right, right, right, absent])
    assert exit_code == 0
    assert "3 of 3 pairs (1 could not be scored)" in words
    assert assess([absent, absent])[0] == 2
