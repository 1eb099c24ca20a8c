"""``lit-grpo analyze --policy`` with a real, tiny policy and a reward that writes its values."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from prepared_data import write_prepared
from stored_answers import start_command
from tiny import LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from lit_grpo.__main__ import main
from lit_grpo.cli.analyze import cached_sampling
from lit_grpo.data import PromptData
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rollout import HFEngine

REWARD = """
import json
from lit_grpo.rewards import Reward

class Written(Reward):
    calls = 0

    def score(self, prompt, completion):
        Written.calls += 1
        number = int(prompt.id.split(":")[1])
        if prompt.id == "verifiable:3" or (prompt.id == "verifiable:4" and Written.calls % 2):
            return None
        value = float(number > 0 and (number == 1 or sum(completion.token_ids) % 3 == 0))
        with open("scores.jsonl", "a") as file:
            file.write(json.dumps([prompt.id, value]) + "\\n")
        return value

class Graded(Reward):
    def score(self, prompt, completion):
        number, parity = int(prompt.id.split(":")[1]), sum(completion.token_ids) % 2
        value = float(number and parity) if prompt.id[0] == "v" else 0.5 + (number and parity) / 5
        with open("scores.jsonl", "a") as file:
            file.write(json.dumps([prompt.id, value]) + "\\n")
        return value

class Flaky(Reward):  # a judge that is down, which some completions do not need
    def score(self, prompt, completion):
        if prompt.id in self.lost or "all" in self.lost:
            if sum(completion.token_ids) % 2:
                raise RuntimeError("the judge is gone")
            return 0.0
        return float(sum(completion.token_ids) % 3 == 0)

class Lost(Flaky):
    lost = ("verifiable:1",)

class LostAll(Flaky):
    lost = ("all",)

class Broken(Reward):
    def score(self, prompt, completion):
        raise RuntimeError("the sandbox is gone")
"""
SLOW = """
import pathlib, time
from lit_grpo.rewards import Reward

class Slow(Reward):
    def score(self, prompt, completion):
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
        return float(sum(completion.token_ids) % 3 == 0)
"""
CONFIG = {
    "trainer": {"accelerator": "cpu"},
    "model": {
        "rewards": [{"class_path": "pass_rewards.Written"}],
        "sampling": {"max_tokens": 3},
    },
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """A model with random weights, as a directory."""
    directory = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(**LLAMA | {"vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def here(here, add_module) -> Path:
    add_module("pass_rewards", REWARD)
    (here / "my.yaml").write_text(yaml.safe_dump(CONFIG))
    write_prepared(here / "data")
    return here


def analyze(*arguments: object, config: str = "my.yaml") -> int:
    return main(["analyze", "data", *map(str, arguments), "--config", config])


def rates(split: str = "train", column: str = "pass_rate") -> dict[str, float | None]:
    table = pq.read_table(f"data/{split}.parquet", columns=["id", column])
    return {row["id"]: row[column] for row in table.to_pylist()}


def mixture(**where: dict) -> dict:
    """Return data of both sources, whose steps would ask for more rows than there are."""
    sources = {
        name: {
            "weight": 0.5,
            "data": {"class_path": kind, "init_args": {"train": "data", "where": where[name]}},
        }
        for name, kind in (("verifiable", "PromptData"), ("open", "RubricData"))
    }
    return {"class_path": "MixtureData", "init_args": {"sources": sources}}


def test_the_pass_rate_of_each_row_is_that_of_the_scores_of_its_completions(
    policy, here, capsys, monkeypatch
):
    monkeypatch.setattr(cached_sampling, "COMPLETIONS_AT_ONCE", 18)  # three rows
    before = pq.read_table("data/train.parquet")
    others = {path.name: path.read_bytes() for path in (here / "data").glob("[hv]*")}
    (here / "data/notes.txt").write_text("mine")
    assert analyze("--policy", policy, "--samples", 6, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    values = defaultdict(list)
    for line in Path("scores.jsonl").read_text().splitlines():
        key, value = json.loads(line)
        values[key].append(value)
    counted = {key: sum(one) / len(one) for key, one in values.items()}
    assert sum(map(len, values.values())) == 6 * 6 + 3
    written = rates()
    assert {key: one for key, one in written.items() if one is not None} == counted
    unknown = {"verifiable:3", *(f"open:{number}" for number in range(8))}
    assert {key for key, one in written.items() if one is None} == unknown
    measured = found["measures"]["verifiable"]["pass_rates"]
    assert (counted["verifiable:0"], counted["verifiable:1"]) == (0, 1)
    assert measured["num_rows"] == 7
    assert measured["num_never"] == sum(one == 0 for one in counted.values())
    assert measured["num_always"] == sum(one == 1 for one in counted.values())
    assert sum(measured["histogram"]) == 7
    assert found["measures"]["open"]["pass_rates"] is None

    table = pq.read_table("data/train.parquet")
    assert table.drop_columns(["pass_rate", "has_gradient"]).equals(before)
    assert table.schema.field("rubric").type == before.schema.field("rubric").type
    assert {path.name: path.read_bytes() for path in (here / "data").glob("[hv]*")} == others
    assert (here / "data/notes.txt").read_text() == "mine"
    manifest = json.loads((here / "data/manifest.json").read_text())
    content = (here / "data/train.parquet").read_bytes()
    assert manifest["splits"]["train"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest["pass_rate"]["train"] == {
        "policy": str(policy),
        "samples": 6,
        "success": None,
        "rewards": ["written"],
    }


def test_without_a_config_a_program_checks_the_verifiable_rows(policy, capsys):
    keys = ("--trainer.accelerator=cpu", "--model.sampling.max_tokens=2")
    assert main(["analyze", "data", "--policy", str(policy), "--samples=2", *keys]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "8 rows with a pass rate: 8 never right, 0 always right",
        "8 of 8 rows would give the policy no gradient: all its completions have the same score",
    ]
    assert set(rates().values()) == {0.0, None}
    given = ("--policy", str(policy), "--samples=2", "--split", "validation", *keys)
    assert main(["analyze", "data", *given]) == 0
    assert list(rates("validation").values()) == [0.0, None] * 2


def test_the_sources_of_a_mixture_are_matched_by_their_ids(policy, here):
    data = mixture(verifiable={"answer": ["1", "3"]}, open={"source": "open"})
    (here / "mix.yaml").write_text(yaml.safe_dump({**CONFIG, "data": data}))
    assert analyze("--policy", policy, "--samples", 2, config="mix.yaml") == 0
    expected = {"verifiable:0", "verifiable:1", *(f"open:{number}" for number in range(8))}
    assert {key for key, one in rates().items() if one is not None} == expected


def test_graded_rows_have_no_pass_rate_and_are_chosen_by_their_gradient(policy, here, capsys):
    data = mixture(verifiable={"source": "verifiable"}, open={"source": "open"})
    model = CONFIG["model"] | {"rewards": [{"class_path": "pass_rewards.Graded"}]}
    (here / "mix.yaml").write_text(yaml.safe_dump({**CONFIG, "model": model, "data": data}))
    assert analyze("--policy", policy, "--samples", 4, config="mix.yaml") == 0
    said = capsys.readouterr()
    values = defaultdict(list)
    for line in Path("scores.jsonl").read_text().splitlines():
        key, value = json.loads(line)
        values[key].append(value)
    differ = {key: len(set(some)) > 1 for key, some in values.items()}
    assert (differ["open:0"], differ["verifiable:0"]) == (False, False)
    assert any(differ[key] for key in differ if key.startswith("open"))
    assert rates(column="has_gradient") == differ
    known = {key for key, one in rates().items() if one is not None}
    assert known == {key for key in values if key.startswith("verifiable")}
    number = sum(not one for one in differ.values())
    assert said.out.splitlines()[-1].startswith(f"{number} of 16 rows would give the policy no gr")
    assert "no pass_rate for the rows of open: their rewards are not only 0 and 1" in said.err
    chosen = PromptData("data", where={"source": "open", "has_gradient": True}).rows("train")
    assert {row.id for row in chosen} == {k for k, one in differ.items() if one and k[0] == "o"}

    assert analyze("--policy", policy, "--samples", 4, "--success", 0.6, config="mix.yaml") == 0
    counted = {key: sum(one >= 0.6 for one in some) / 4 for key, some in values.items()}
    assert rates() == counted
    assert "no pass_rate" not in capsys.readouterr().err


def test_the_policy_takes_the_place_of_one_that_the_config_builds(policy, here):
    built = {**CONFIG, "model": {**CONFIG["model"], "policy": {"architecture": LLAMA}}}
    (here / "built.yaml").write_text(yaml.safe_dump(built))
    assert analyze("--policy", policy, "--samples", 2, config="built.yaml") == 0


def test_a_second_policy_replaces_the_column_of_the_first(policy, here):
    for _ in range(2):
        assert analyze("--policy", policy, "--samples", 2) == 0
    assert pq.read_schema("data/train.parquet").names.count("pass_rate") == 1


def samples() -> list[dict]:
    paths = Path("data.samples").glob("policy-*/*.jsonl")
    lines = [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def test_a_second_start_after_a_kill_samples_only_what_is_missing(
    policy, here, capsys, monkeypatch
):
    """The reward waits, so that the process is killed when three rows are sampled."""
    monkeypatch.setattr(cached_sampling, "COMPLETIONS_AT_ONCE", 18)
    (here / "slow_rewards.py").write_text(SLOW)
    words = ["--policy", str(policy), "--samples", "6", "--config", "my.yaml"]
    words.append("--model.rewards=[slow_rewards.Slow]")
    before = {path.name: path.read_bytes() for path in (here / "data").glob("*")}
    process, _ = start_command("analyze", "data", *words)
    try:
        while process.is_alive() and len(samples()) < 18:
            time.sleep(0.01)
    finally:
        process.kill()
        process.join(60)
    (path,) = Path("data.samples").glob("policy-*/*.jsonl")
    path.write_bytes(path.read_bytes()[:-9])  # as if it had been killed while it wrote
    kept = samples()
    assert len(kept) == 17
    assert {path.name: path.read_bytes() for path in (here / "data").glob("*")} == before
    (here / "go").touch()
    assert main(["analyze", "data", *words]) == 0
    assert capsys.readouterr().err.startswith("17 of 48 completions were sampled before: /")
    found = samples()
    assert all(one in found for one in kept)
    assert [*Counter(one["k"] for one in found).values()] == [6] * 8
    right = defaultdict(int)
    for one in found:
        right[one["k"]] += sum(one["ids"]) % 3 == 0
    counted = sorted(number / 6 for number in right.values())
    assert sorted(one for one in rates().values() if one is not None) == counted


def test_an_engine_that_breaks_its_contract_is_told_so_and_nothing_is_kept(
    policy, here, capsys, monkeypatch
):
    generate = HFEngine.generate

    def without_reason(self, *args, **settings):
        for row, one in generate(self, *args, **settings):
            yield row, replace(one, finish_reason="unknown")

    monkeypatch.setattr(HFEngine, "generate", without_reason)
    assert analyze("--policy", policy, "--samples", 4) == 1
    assert "HFEngine.generate (" in (said := capsys.readouterr().err)
    assert "must yield a finish_reason of" in said
    assert samples() == []


def test_samples_are_scored_again_and_not_sampled_again(policy, here):
    assert analyze("--policy", policy, "--samples", 4) == 0
    first = samples()
    assert analyze("--policy", policy, "--samples", 4, "--success", 0) == 0
    assert len(samples()) == len(first)
    assert {one for one in rates().values() if one is not None} == {1.0}
    assert analyze("--policy", policy, "--samples", 6) == 0
    assert len(samples()) == len(first) * 6 // 4


@pytest.mark.parametrize("change", ["policy", "sampling", "prompt"])
def test_samples_of_another_policy_sampling_or_prompt_are_not_taken(change, policy, here):
    own = here / "own"
    shutil.copytree(policy, own)
    assert analyze("--policy", own, "--samples", 2) == 0
    num_before = len(samples())
    keys = []
    if change == "policy":
        os.utime(own / "model.safetensors", (1, 1))
    elif change == "sampling":
        keys = ["--model.sampling.temperature=0.7"]
    else:
        keys = ["--data=PromptData", "--data.train=data", "--data.where={kind: verifiable}"]
        keys += ["--data.template={{ prompt }} Say it:", "--data.prompts_per_step=1"]
    assert analyze("--policy", own, "--samples", 2, *keys) == 0
    assert len(samples()) == num_before + (16 if change == "prompt" else num_before)


def test_nothing_is_written_if_a_reward_fails_everywhere(policy, here, capsys):
    before = {path.name: path.read_bytes() for path in (here / "data").glob("*")}
    assert analyze("--policy", policy, "--model.rewards=[pass_rewards.Broken]") == 1
    assert "a reward failed on every completion" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (here / "data").glob("*")} == before


def test_a_judge_that_is_gone_leaves_the_data_as_they_are(policy, here, capsys):
    assert analyze("--policy", policy, "--samples", 6) == 0
    before = {path.name: path.read_bytes() for path in (here / "data").glob("*")}
    capsys.readouterr()
    lost = "--model.rewards=[pass_rewards.LostAll]"
    assert analyze("--policy", policy, "--samples", 6, lost) == 4
    error = capsys.readouterr().err
    assert "of the 48 rows (46%) have no score" in error
    assert "the judge is gone" in error
    assert "data is unchanged" in error
    assert {path.name: path.read_bytes() for path in (here / "data").glob("*")} == before


def test_a_row_without_all_scores_has_no_rate_and_no_answer_about_its_gradient(
    policy, here, capsys
):
    keys = ["--model.rewards=[pass_rewards.Lost]", "--model.outage.max_absent_fraction=0.9"]
    assert analyze("--policy", policy, "--samples", 8, *keys) == 0
    assert "have no pass_rate and no has_gradient" in " ".join(capsys.readouterr().err.split())
    for column in ("pass_rate", "has_gradient"):
        found = rates(column=column)
        assert found.pop("verifiable:1") is None
        assert None not in {found[key] for key in found if key.startswith("verifiable")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "--policy=p", "--samples=1"], "error: samples must be >= 2, got 1"),
        (["run", "--policy=p"], "error: policy needs prepared data, got run (the pass rates"),
        (["data", "--policy=p", "--config=no.yaml"], "error: no.yaml"),
        (
            ["data/holdout.parquet", "--policy=p"],
            "error: split must be train or validation with --policy, got holdout (pass rates ch",
        ),
        (["data", "--model.group_size=2"], "error: unrecognized arguments: --model.group_size=2"),
        (
            ["data", "--policy=p", "--config=my.yaml", "--data=AdditionData"],
            "error: the training prompts of the config must be rows of data, and none is.",
        ),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, message, policy, here, capsys):
    (here / "run/completions").mkdir(parents=True)
    given = [one.replace("=p", f"={policy}") if one == "--policy=p" else one for one in arguments]
    assert main(["analyze", *given]) == 2
    assert capsys.readouterr().err.startswith(message)
