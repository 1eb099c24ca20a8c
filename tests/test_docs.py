"""Check the documentation against the code: snippets run, tables and links are right."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import runpy
import shlex
import sys
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import get_args, get_type_hints

import feature_matrix
import pandas as pd
import pytest
import run_logs
import sglang_server
import torch
import yaml
from judge_server import JudgeServer
from paths import ROOT
from sglang_server import OFFLINE
from tiny import LLAMA, completion, prompt, tiny_policy

from lit_grpo import callbacks, data, rewards
from lit_grpo.__main__ import main
from lit_grpo.cli.estimate.devices import parse_gpus
from lit_grpo.cli.prepare.recipe import Duplicates, Gold, Recipe, RecipeSource
from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.judge import Judge, Limits, Price
from lit_grpo.judge.reply import Form, Grade, Text, read_reply
from lit_grpo.objective import (
    AdvantageConfig,
    DistillationTerm,
    EntropyTerm,
    KLTerm,
    Objective,
    SamplerCorrection,
)
from lit_grpo.objective.aggregations import AGGREGATIONS
from lit_grpo.objective.inputs import LossInputs
from lit_grpo.policy import LocalTeacher, LoRA, Policy
from lit_grpo.rewards import JudgedReward, Reward
from lit_grpo.rewards.judged.alignment import Alignment
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rollout import (
    HFEngine,
    Launch,
    Sampling,
    Supervision,
    VLLMEngine,
    VLLMServerEngine,
    VLLMTeacher,
    WeightCheck,
)
from lit_grpo.rollout.server.engine import ServedEngine
from lit_grpo.runs.trainer_settings import TRAINER_DEFAULTS
from lit_grpo.training import Evaluation, GRPOModule, OutagePolicy, SFTModule, UpdateConfig
from lit_grpo.types import Outcome, RewardTable

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
GUIDES = [README, *sorted((DOCS / "guides").glob("*.md"))]

SUMS = "".join(
    json.dumps({"prompt": f"What is 12 + {n}?", "answer": str(12 + n)}) + "\n" for n in range(20)
)
"""Rows as the README describes them."""

# Makes every config run anywhere: a tiny model, short completions, two steps.
TINY = {
    "trainer": {"accelerator": "cpu", "max_steps": 2, "val_check_interval": 1},
    "model": {
        "policy": {"path": None, "architecture": LLAMA},
        "sampling": {"max_tokens": 6},
        "evaluation": {"num_samples": 2},
    },
    "data": {"init_args": {"prompts_per_step": 4}},
}
# What `prepare` writes for a training run.
PREPARED = {
    "data": {
        "class_path": "MixtureData",
        "init_args": {
            "sources": {
                "verifiable": {
                    "data": {"class_path": "PromptData", "init_args": {"train": "prepared"}}
                }
            }
        },
    }
}
# A reward that differs between the completions of random weights.
MIXED = {"class_path": "FormatReward", "init_args": {"pattern": "[a-z]", "mode": "search"}}
# Turns on what some metrics are logged for only.
EVERY_METRIC = {
    "model": {
        "objective": {
            "kl": {"coef": 0.01, "target": 0.1},
            "entropy": {"target": 9.0},
            "distillation": {"coef": 0.1},
        },
        "teacher": {"path": "teacher"},
        "dynamic_sampling_rounds": 1,
    }
}
TIMED = {"trainer": {"callbacks+": [{"class_path": "TimingLog", "init_args": {"stages": True}}]}}


SERVED = {
    "trainer": {"callbacks": [], "max_steps": 1},
    "model": {
        "engine": {
            "class_path": "SGLangEngine",
            "init_args": {
                "launch": {"program": [sys.executable, sglang_server.__file__], "env": OFFLINE},
                "supervision": {"health_timeout": 60},
            },
        }
    },
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def named_blocks() -> dict[str, str]:
    """The code blocks of README and guides whose first line is a comment with a file name."""
    found = [one for page in GUIDES for kind in ("python", "yaml") for one in blocks(page, kind)]
    return {block.split()[1]: block for block in found if re.match(r"# \w+\.\w+\n", block)}


def table_rows(text: str) -> list[list[str]]:
    """The cells of all tables, without their heads."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    return [row for row, after in zip(rows, [*rows[1:], [""]], strict=True)
            if "---" not in row[0] and not after[0].startswith("---")]  # fmt: skip


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory with the files of README and guides, and the working directory of these tests."""
    directory = tmp_path_factory.mktemp("readme")
    for name, text in named_blocks().items():
        (directory / name).write_text(text)
    (directory / "prepared").mkdir()
    (directory / "prepared/data.yaml").write_text(yaml.safe_dump(PREPARED))
    (directory / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    mixture = TINY | {"data": {"init_args": {"prompts_per_step": 8}}}
    (directory / "tiny_mixture.yaml").write_text(yaml.safe_dump(mixture))
    (directory / "timed.yaml").write_text(yaml.safe_dump(TIMED))
    (directory / "every_metric.yaml").write_text(yaml.safe_dump(EVERY_METRIC))
    tiny_policy(seed=1).save_pretrained(directory / "teacher")
    (directory / "mixed.yaml").write_text(yaml.safe_dump({"model": {"rewards+": [MIXED]}}))
    with run_logs.workplace(directory) as patch:
        runpy.run_path("make_rows.py")
        assert (directory / "sums.jsonl").read_text() == SUMS
        sys.path.insert(0, str(directory))
        for name in named_blocks():  # a test of another file may have imported such a module
            patch.delitem(sys.modules, Path(name).stem, raising=False)
        yield directory


@pytest.fixture(scope="module")
def grpo_run(workplace) -> Path:
    """A run of the guides' config with their reward, callback and engine."""
    files = [f"--config={name}.yaml" for name in ("my", "tiny", "mixed", "timed", "every_metric")]
    engine = "--model.engine=my_engines.PlainEngine"
    assert main(["fit", *files, engine, "--run_dir=runs/my/0"]) == 0
    return workplace / "runs/my/0"


@pytest.fixture(scope="module")
def sft_run(workplace) -> Path:
    files = ["--config=warm.yaml", "--config=tiny.yaml", "--config=timed.yaml"]
    assert main(["sft", *files, "--run_dir=runs/warm/0"]) == 0
    return workplace / "runs/warm/0"


@pytest.fixture(scope="module")
def served_run(workplace) -> Path:
    """A run of the guides' config with an engine that starts a server."""
    (workplace / "served.yaml").write_text(yaml.safe_dump(SERVED))
    files = [f"--config={name}.yaml" for name in ("my", "tiny", "served")]
    assert main(["fit", *files, "--run_dir=runs/served"]) == 0
    return workplace / "runs/served"


@pytest.fixture(scope="module")
def mixture_run(workplace) -> Path:
    """A run of the guides' config with the sources and phases of the guide."""
    files = [f"--config={name}.yaml" for name in ("my", "mixture", "tiny_mixture")]
    assert main(["fit", *files, "--run_dir=runs/mixture"]) == 0
    return workplace / "runs/mixture"


@pytest.fixture(scope="module")
def judged_run(workplace) -> Path:
    """A run of the guides' config with a further reward, the guide's judge with two votes a row."""
    files = [f"--config={name}.yaml" for name in ("my", "tiny", "judged")]
    with JudgeServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        patch.setenv("OPENAI_API_KEY", "x")
        words = [*files, "--model.rewards.votes=2", "--trainer.callbacks=[]"]
        assert main(["fit", *words, "--run_dir=runs/judged"]) == 0
    return workplace / "runs/judged"


def test_the_reward_of_the_readme_has_fewer_than_15_lines_and_works(workplace):
    text = named_blocks()["my_rewards.py"]
    assert len(text.splitlines()) < 15
    reward = importlib.import_module("my_rewards").KeywordsReward()
    texts = ["Salt on every WAVE.", "a wave", "nothing of it"]
    completions = [completion(text=text) for text in texts]
    with RewardSuite([reward]) as suite:
        asked = suite.score([prompt(keywords=["wave", "salt"])], [completions])
        unasked = suite.score([prompt(keywords=[])], [completions])
    assert asked.rewards.tolist() == [[1.0, 0.5, 0.0]]
    assert not unasked.valid.any()
    outcomes = {score.outcome for score in unasked.groups[0].scores["keywords"]}
    assert outcomes == {Outcome.ABSTAIN}


@pytest.mark.slow
def test_the_engine_reports_the_logprobs_of_the_policy_that_it_was_given(grpo_run):
    metrics = pd.read_csv(grpo_run / "metrics.csv")
    assert metrics["step"].tolist() == [-1, 0, 1]
    metrics = metrics[1:]
    assert metrics["sampler/logprob_difference_max"].max() < 1e-3
    assert (metrics["policy/grad_norm"] > 0).all()
    rows = pd.read_parquet(grpo_run / "completions/step_000001.parquet")
    assert len(rows) == 4 * 8
    assert rows.groupby("prompt_id")["completion"].nunique().max() > 1
    assert "my_engines.PlainEngine" in (grpo_run / "config.yaml").read_text()


@pytest.mark.slow
def test_the_callback_ends_a_run_with_its_reason_and_exit_code(workplace):
    guard = "--trainer.callbacks=my_callbacks.LengthGuard"
    files = ["--config=my.yaml", "--config=tiny.yaml", "--run_dir=runs/guarded"]
    assert main(["fit", *files, guard, "--trainer.callbacks.max_mean_length=1"]) == 20
    *_, reason, advice = (workplace / "runs/guarded/run.log").read_text().splitlines()
    assert re.search(r"Completions are \d tokens long", reason)
    assert advice.endswith("Resume after 1 step with: lit-grpo fit runs/guarded")
    assert not (workplace / "runs/guarded/final").exists()


def run_python(text: str, rows: str) -> dict:
    """Run an example on a tiny model for a few steps; return its names."""
    for old, new in {
        '"Qwen/Qwen2.5-0.5B-Instruct"': f"architecture={LLAMA}",
        "=200": "=4",
        "=100": "=2",
        "train.jsonl": rows,
        "Sampling(max_tokens=64)": "Sampling(max_tokens=6)",
        "Sampling(max_tokens=256)": "Sampling(max_tokens=6)",
    }.items():
        text = text.replace(old, new)
    names = {"__name__": "__main__"}
    exec(compile(text, "example.py", "exec"), names)
    return names


def test_ten_lines_of_yaml_train_a_model(workplace):
    assert len(named_blocks()["math.yaml"].splitlines()) <= 10
    files = ["--config=math.yaml", "--config=tiny.yaml", "--data.train=sums.jsonl"]
    assert main(["fit", *files, "--run_dir=runs/math"]) == 0
    assert (workplace / "runs/math/final/model.safetensors").exists()
    assert_no_warning_of_libraries(workplace / "runs/math/run.log")


def assert_no_warning_of_libraries(log: Path) -> None:
    assert not re.search(r"py\.warnings|WARNING lightning", log.read_text())


def test_the_example_of_the_metrics_reads_the_rows_of_a_run(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "runs/my/0/completions/step_000000.parquet"
    rows.parent.mkdir(parents=True)
    columns = {"prompt": ["1+1="], "completion": ["2"], "reward": [1.0], "advantage": [0.5]}
    pd.DataFrame(columns).to_parquet(rows)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "metrics.md").read_text(), re.DOTALL)
    exec(compile(example, "example.py", "exec"), {})
    assert capsys.readouterr().out.split()[-4:] == ["1+1=", "2", "1.0", "0.5"]


@pytest.mark.slow
def test_ten_lines_of_python_train_a_model(workplace):
    text = named_blocks()["train.py"]
    assert len([line for line in text.splitlines()[1:] if line.strip()]) <= 10
    names = run_python(text, "sums.jsonl")
    assert len(pd.read_csv("runs/python/metrics.csv")) == 4
    assert names["module"].rollout_step == 4
    assert (workplace / "runs/python/final/model.safetensors").exists()
    assert_no_warning_of_libraries(workplace / "runs/python/run.log")


def test_the_documented_learning_rates_are_those_of_the_code():
    rates = {
        command: (rate_of(kind), kind.usual_lora_rate)
        for command, kind in {"sft": SFTModule, "fit": GRPOModule}.items()
    }
    row = r"\| `lit-grpo (\w+)` \| (\S+) \(default\) \| (\S+) \|"
    table = re.findall(row, (DOCS / "guides" / "data.md").read_text())
    assert {name: (float(full), float(lora)) for name, full, lora in table} == rates
    told = re.findall(
        r"([\de-]+) for `(\w+)` \(default ([\de-]+)\)", (ROOT / "README.md").read_text()
    )
    assert {name: (float(full), float(lora)) for lora, name, full in told} == rates


def rate_of(kind: type) -> float:
    weight = torch.nn.Parameter(torch.zeros(1))
    (group,) = inspect.signature(kind).parameters["optimizer"].default([weight]).param_groups
    return group["lr"]


def test_the_notebook_resumes_its_own_run_and_can_be_read(workplace, capsys):
    names = run_python(named_blocks()["notebook.py"], "sums.jsonl")
    assert names["trainer"].stop_reason is None
    assert capsys.readouterr().out.endswith("done\n")
    metrics = pd.read_csv("runs/notebook/metrics.csv")
    assert metrics["step"].tolist() == [0, 1, 2, 3]
    assert {"run.log", "completions", "final"} <= {
        path.name for path in Path("runs/notebook").iterdir()
    }
    run_python(named_blocks()["read.py"], "")
    assert "reward/mean" in capsys.readouterr().out


def test_the_reward_of_the_guide_compares_siblings(workplace):
    (workplace / "sibling_rewards.py").write_text(named_blocks()["sibling_rewards.py"])
    reward = importlib.import_module("sibling_rewards").ShorterThanSiblings()
    completions = [completion([1] * length) for length in (1, 3, 3)]
    with RewardSuite([reward]) as suite:
        scored = suite.score([prompt()], [completions])
    assert scored.rewards.tolist() == [[1.0, 0.0, 0.0]]


def test_the_guide_tries_a_reward(workplace, capsys):
    run_python(named_blocks()["try_reward.py"], "")
    assert capsys.readouterr().out == "1.0\n"


def commands() -> list[str]:
    """Every command of any page that reads a config."""
    shell = "".join(block for page in PAGES for block in blocks(page, "sh"))
    lines = shell.replace("\\\n", " ").splitlines()
    reading = r"lit-grpo (fit|sft|validate|test|plan) "
    return sorted({line for line in lines if re.match(reading, line)})


def parsed(line: str, capsys) -> dict:
    """Return the config of a command of the documentation."""
    words = shlex.split(line.replace("runs/math", "runs/my"), comments=True)
    with pytest.raises(SystemExit) as leave:
        main([*words[1:], "--print_config"])
    assert leave.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_documentation_is_valid(line, grpo_run, capsys):
    config = parsed(line, capsys)
    assert config["model"]
    if gpus := config.get("gpus"):
        parse_gpus(gpus)


def test_the_commands_of_8_gpus_give_each_one_to_ranks_and_servers_as_the_layouts_say(capsys):
    shared = []
    for line in commands():
        if "launch.num_servers" not in line:
            continue
        config = parsed(line, capsys)
        launch = config["model"]["engine"]["init_args"]["launch"]
        ranks = [*range(int(config["trainer"]["devices"]))]
        servers = [*map(int, launch["devices"])]
        assert len(servers) == launch["num_servers"]
        assert {*ranks, *servers} == {*range(8)}
        shared.append(ranks == servers)
        assert launch["memory_fraction"] < 0.5 or not {*ranks} & {*servers}
    assert sorted(shared) == [False, True]


@pytest.mark.parametrize("number", range(len(blocks(DOCS / "configuration.md", "yaml"))))
def test_a_fragment_of_a_config_can_be_added_to_that_of_the_readme(number, workplace, capsys):
    (workplace / "fragment.yaml").write_text(blocks(DOCS / "configuration.md", "yaml")[number])
    with pytest.raises(SystemExit) as leave:
        main(["fit", "--config=my.yaml", "--config=fragment.yaml", "--print_config"])
    assert leave.value.code == 0


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_tests_that_the_matrix_of_features_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)`", (DOCS / "scale.md").read_text())
    assert len(named) > 12
    assert [path for path in named if not (ROOT / path).is_file()] == []


def feature_rows() -> list[str]:
    text = (DOCS / "scale.md").read_text().partition("\n| | one process (`auto`) |")[2]
    return text.partition("\n\n")[0].splitlines()[2:]


def named_files(cell: str) -> set[str]:
    """The files of tests with several processes that a cell names."""
    paths = re.findall(r"`tests/end_to_end/(\w+)\.py`", cell)
    return {*paths, *(feature_matrix.LETTERS[one] for one in re.findall(r"\b[A-Z]\b", cell))}


def named_stages(text: str) -> set[str]:
    return set("".join(re.findall(r"(?:stages? |stage_|zero)(\d(?:(?:, | and )\d)*)", text))) & {
        *"123"
    }


@pytest.mark.parametrize("line", feature_rows(), ids=lambda line: line.split(" | ")[0][2:])
def test_a_row_of_the_matrix_of_features_names_tests_that_run_it(line):
    keys = [key for key in feature_matrix.COVERED if line.startswith(f"| {key}")]
    ids = feature_matrix.COVERED[keys[0]] if keys else ([], [], [])
    _, _, *cells = line.strip("|").split(" | ")
    for cell, tests in zip(cells, ids, strict=True):
        files = {feature_matrix.file_of(test) for test in tests}
        assert files == named_files(cell), cell
        for test in tests:
            assert test.partition("::")[2] in feature_matrix.all_ids(feature_matrix.file_of(test))
        if not tests:
            assert re.search("^–|not tested|the same test|`tests/", cell), cell
    stages = named_stages(cells[-1]) or {*"123"}
    of_tests = [named_stages(test) for test in ids[-1]]
    assert not ids[-1] or stages == set().union(*of_tests) or not all(of_tests), cells[-1]


def test_no_test_is_listed_for_a_row_that_the_matrix_lacks():
    lines = feature_rows()
    for key in feature_matrix.COVERED:
        assert sum(line.startswith(f"| {key}") for line in lines) == 1, key


def test_every_function_in_the_table_of_equations_exists():
    table = (DOCS / "algorithm.md").read_text().split("## 1.")[0]
    functions = [name for row in table_rows(table) for name in code(row[1])]
    assert len(functions) > 12
    for function in functions:
        module, _, name = function.rpartition(".")
        assert callable(getattr(importlib.import_module(f"lit_grpo.{module}"), name))


def tree() -> list[str]:
    """The lines of the README's tree."""
    (text,) = (block for block in blocks(README, "text") if block.startswith("lit_grpo/"))
    return text.splitlines()


def folders_of(lines: list[str]) -> list[str]:
    """The folders of a tree; a line may name several."""
    folders, found = [""], []
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        for name in takewhile(lambda word: word.endswith("/"), line.split()):
            folders[depth + 1 :] = [folders[depth] + name]
            found.append(folders[-1])
    return found


def test_the_tree_has_every_folder_of_the_package_and_is_short():
    lines = tree()
    assert len(lines) <= 40
    packages = {path.parent for path in (ROOT / "lit_grpo").rglob("__init__.py")}
    names = {f"{path.relative_to(ROOT).as_posix()}/" for path in packages}
    linked = ("lit_grpo/callbacks/", "lit_grpo/configs/", "lit_grpo/runs/report/page/")
    top = {"callbacks/", "configs/", "scripts/", "tests/", "docs/"}
    assert set(folders_of(lines)) == {name for name in names if not name.startswith(linked)} | top


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def test_the_readme_activates_the_environment_before_it_uses_the_command():
    commands = [block for block in blocks(README, "sh") if re.search(r"^lit-grpo ", block, re.M)]
    assert len(commands) >= 2
    for block in commands:
        assert "activate" in block.partition("lit-grpo")[0]
    assert (
        ".venv/bin/lit-grpo" in (ROOT / "README.md").read_text()
    )  # for those who do not activate it


def test_extras_are_installed_from_the_checkout_and_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for page in PAGES:
        for line in page.read_text().splitlines():
            if re.search(r"pip install.*\[", line):
                found.setdefault(page.name, []).append(line)
                named = re.search(r"""pip install -e ['"]\.\[([\w,]+)\]['"]""", line)
                assert named, line
                assert {*named[1].split(",")} <= {*extras["optional-dependencies"]}
    assert {"README.md", "judge.md", "judges.md"} <= {*found}


SHIPPED = [
    GRPOModule, SFTModule, Policy, LoRA, LocalTeacher, VLLMTeacher, Sampling, HFEngine, Objective,
    KLTerm, DistillationTerm, EntropyTerm, SamplerCorrection, AdvantageConfig, UpdateConfig,
    Evaluation, OutagePolicy, Reward, Judge, ServedEngine, VLLMServerEngine, VLLMEngine, Launch,
    WeightCheck, Supervision, Limits, Price, ZeROStrategy, data.PromptData, data.RubricData,
    data.StreamData,
    data.Adaptive, data.AdditionData, data.MixtureData, data.MixtureSource, data.Phase,
    Recipe, RecipeSource, Duplicates, Gold,
    *(kind for kind in vars(rewards).values()
      if inspect.isclass(kind) and issubclass(kind, Reward) and kind not in (Reward, JudgedReward)),
    *(getattr(callbacks, name) for name in callbacks.__all__),
]  # fmt: skip


def documented_keys(name: str) -> dict[str, str]:
    """Key -> default, from the section of that heading."""
    text = (DOCS / "configuration.md").read_text()
    section = re.search(rf"^#+ `?{name}`?\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, f"docs/configuration.md has no section on {name}"
    return {code(row[0])[0]: row[1] for row in table_rows(section[1])}


def expected_keys(kind: type) -> dict[str, inspect.Parameter]:
    parameters = list(inspect.signature(kind).parameters.values())
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = {one.name: one for one in parameters if one.kind in named}
    if kind is ServedEngine:
        own.pop("api")  # set by subclasses
    if issubclass(kind, Reward) and kind is not Reward:
        own = {name: one for name, one in own.items() if name not in expected_keys(Reward)}
    return own


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_the_documented_keys_and_defaults_are_those_of_the_signature(kind):
    documented, expected = documented_keys(kind.__name__), expected_keys(kind)
    assert list(documented) == list(expected)
    own = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    factories = {
        one.name: one.default_factory
        for one in own
        if one.default_factory is not dataclasses.MISSING
    }
    for name, parameter in expected.items():
        cell, default = documented[name], parameter.default
        if default is parameter.empty:
            assert cell == "required", name
        elif name == "optimizer":
            (group,) = default([torch.nn.Parameter(torch.zeros(1))]).param_groups
            lr = format(group["lr"], "g").replace("e-0", "e-")
            assert cell == f"`AdamW`, lr {lr}, weight decay {group['weight_decay']:g}"
        elif dataclasses.is_dataclass(default):
            assert code(cell) == [type(default).__name__], name
        else:
            if name in factories:
                default = factories[name]()
            plain = list(default) if isinstance(default, tuple) else default
            assert yaml.safe_load(code(cell)[0]) == plain, name


def test_the_trainer_s_own_defaults_are_documented():
    text = (DOCS / "configuration.md").read_text()
    table = text[text.index("These differ") : text.index("And these are often set")]
    given = {code(row[0])[0]: yaml.safe_load(code(row[1])[0]) for row in table_rows(table)}
    assert given == TRAINER_DEFAULTS


def glossary() -> set[str]:
    text = (DOCS / "metrics.md").read_text().split("## The row")[1]
    names = text.split("## Completions on disk")[0]
    return {code(row[0])[0] for row in table_rows(names)}


def generic(column: str) -> str:
    """Replace what depends on the config: ``val/avg@4`` becomes ``val/avg@<n>``."""
    column = re.sub(
        r"^(reward|completions|data|val|adaptive)/(sums|words)/", r"\1/<source>/", column
    )
    column = re.sub(r"^adaptive/<source>/\w+$", "adaptive/<source>/<level>", column)
    column = re.sub(r"^reward/\w+/mean$", "reward/<name>/mean", column)
    column = re.sub(
        rf"^reward/\w+/({'|'.join(Outcome)})_fraction$", "reward/<name>/<outcome>_fraction", column
    )
    column = re.sub(r"^timing/judge_wait_\w+_s$", "timing/judge_wait_<setting>_s", column)
    column = re.sub(r"^val/(avg|unscored_fraction)@\d+$", r"val/\1@<n>", column)
    return re.sub(r"^val/pass@\d+$", "val/pass@<k>", column)


@pytest.mark.slow
def test_the_glossary_has_every_metric_that_runs_log_and_no_other(
    grpo_run, sft_run, judged_run, served_run, mixture_run
):
    columns = {
        generic(name)
        for run in (grpo_run, sft_run, judged_run, served_run, mixture_run)
        for name in pd.read_csv(run / "metrics.csv", nrows=0).columns
    }
    parts = {f"reward/<name>/{one.name}" for one in dataclasses.fields(Alignment)}
    elsewhere = {"perf/memory_reserved_gb", "perf/num_compilations", *parts}
    assert columns | elsewhere == glossary()


def test_the_columns_of_completions_are_documented(grpo_run):
    text = (DOCS / "metrics.md").read_text().split("## Completions on disk")[1]
    documented = {name for row in table_rows(text) for name in code(row[0])}
    table = pd.read_parquet(grpo_run / "completions/step_000000.parquet")
    of_rewards = r"^(score|outcome|detail|seconds|cost)/.*"
    columns = {re.sub(of_rewards, r"\1/<name>", name) for name in table}
    assert documented == columns


def test_the_stages_of_a_step_are_documented(grpo_run):
    text = (DOCS / "architecture.md").read_text().split("### Stages")[1].split("## Ranks")[0]
    rows = {code(row[0])[0]: set(code(row[2])) for row in table_rows(text)}
    logged: dict[str, set[str]] = {}
    for line in (grpo_run / "run.log").read_text().splitlines():
        if match := re.search(r"step \d+  (\w+)(?: \d+)? +[\d.]+ s +[\d.]+ GiB(.*)", line):
            logged.setdefault(match[1], set()).update(re.findall(r"  (\w+) [-\d.n]", match[2]))
    del logged["total"]
    assert rows == logged


@pytest.mark.parametrize("kind", [LossInputs, RewardTable])
def test_the_fields_that_own_objectives_get_are_documented(kind):
    guide = (ROOT / "docs/guides/objective.md").read_text()
    table = guide.partition(f"| field of `{kind.__name__}`")[2].partition("\n\n")[0]
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert names == [one.name for one in dataclasses.fields(kind)]


def test_the_examples_of_rows_are_among_those_that_the_script_writes(workplace):
    (shown,) = blocks(DOCS / "guides" / "data.md", "json")
    rows = [*map(json.loads, Path("train.jsonl").read_text().splitlines())]
    assert len(rows) == 24
    assert all(json.loads(row) in rows for row in shown.splitlines())


def test_the_replies_that_are_documented_are_read_as_verdicts():
    (block,) = blocks(DOCS / "judges.md", "json")
    form = Form({"explanation": Text(), "score": Grade(10)})
    single, several = block.splitlines()
    assert read_reply(single, form, ["1"])["1"]["score"] == 8
    assert [one["score"] for one in read_reply(several, form, ["1", "2"]).values()] == [8, 0]


def has_key(kind: type, path: list[str]) -> bool:
    """Return whether a class takes this argument, or the class of its argument does."""
    name, *rest = path
    if name not in inspect.signature(kind).parameters or not rest:
        return name in inspect.signature(kind).parameters
    if name == "optimizer":
        return has_key(torch.optim.AdamW, rest)
    hint = get_type_hints(kind.__init__)[name]
    return any(has_key(one, rest) for one in get_args(hint) or [hint] if inspect.isclass(one))


def test_the_names_of_other_trainers_and_ours_exist():
    import trl

    (table, _) = (DOCS / "guides" / "migrate.md").read_text().split("| `aggregation` | TRL")
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    theirs |= set(inspect.signature(trl.GRPOTrainer).parameters)
    values = {"k3", "colocate", "server", "cispo", "sapo", "vespo"}
    rows = [row for row in table_rows(table) if row[0] != "here"]
    assert len(rows) > 60
    for ours, trl_names, _ in rows:
        (key, *_), group = code(ours), {"model": GRPOModule, "data": data.PromptData}
        root, *path = key.split(".")
        assert root not in group or has_key(group[root], path), key
        names = " ".join(code(trl_names)).replace("vllm_mode:", "").replace("accelerate launch", "")
        for name in re.findall(r"[a-z_0-9]+", names):
            assert name in theirs | values, name


def test_every_aggregation_is_in_the_table_of_names():
    (_, table) = (DOCS / "guides" / "migrate.md").read_text().split("| `aggregation` | TRL")
    assert {code(row[0])[0] for row in table_rows(table)} == set(AGGREGATIONS)
