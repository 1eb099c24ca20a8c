"""The parser of a command with keys: its errors, what it reads, and what it prints."""

import pytest
import yaml

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.parser import Parser
from lit_grpo.rewards import Reward
from lit_grpo.types import UserError


class Coloured(Reward):
    overridden_by_environment = {"colour": "COLOUR"}

    def __init__(self, colour: str = "red", untyped=None):
        super().__init__()

    def score(self, prompt, completion):
        return 0.0


class Sized:
    def __init__(self, width: int = 1, name: str | None = None) -> None: ...


@pytest.fixture
def parser() -> Parser:
    parser = Parser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--run_dir", type=str, default="runs")
    parser.add_argument("--reward", type=Reward | None, default=None)
    parser.add_class_arguments(Sized, "model")
    return parser


REWARD = f"--reward={__name__}.Coloured"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model.widht=3"], "model.widht: no such key. Did you mean width?"),
        ([REWARD, "--reward.color=b"], "reward: Coloured.color: no such key. Did you mean colour?"),
        (
            ["--model.width=null"],
            "model.width: expected int, got null. Remove it for the default, or write it: 1.",
        ),
        (["--model=3"], "model: expected keys under it (width, name), got 3."),
        (
            ["--model.name=None"],
            "model.name: expected str or null, got the string None. Write null.",
        ),
    ],
)
def test_a_mistake_is_one_line_for_the_user(arguments, line, parser):
    with pytest.raises(UserError) as raised:
        parser.parse_args(arguments)
    assert str(raised.value) == line


def test_a_tilde_is_the_home_directory(parser, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert parser.parse_args(["--run_dir=~/a"]).run_dir == f"{here}/a"


@pytest.mark.parametrize("is_in_file", [False, True])
def test_a_word_of_the_command_line_is_read_and_a_text_of_a_file_kept(is_in_file, parser, here):
    kind = {"class_path": f"{__name__}.Coloured", "init_args": {"untyped": "7"}}
    (here / "my.yaml").write_text(yaml.safe_dump({"reward": kind}))
    given = ["--config=my.yaml"] if is_in_file else [REWARD, "--reward.untyped=7"]
    assert parser.parse_args(given).reward.init_args.untyped == ("7" if is_in_file else 7)


def test_a_config_is_printed_as_it_would_run_and_stays_as_it_was(parser, monkeypatch):
    config = parser.parse_args([REWARD])
    monkeypatch.setenv("COLOUR", "blue")
    assert yaml.safe_load(parser.dump(config))["reward"]["init_args"]["colour"] == "blue"
    assert config.reward.init_args.colour == "red"


WHOLE = """
trainer: {max_steps: 2}
model:
  policy: {path: no_such_model}
  rewards: [MathReward]
data: {class_path: PromptData, init_args: {train: train.jsonl}}
"""


@pytest.mark.parametrize(
    ("key", "given", "error"),
    [
        ("rewards", "reward", "model.reward: no such key. Did you mean rewards?"),
        ("rewards", "reward_funcs", "model.reward_funcs: no such key. Set model.rewards."),
        ("policy", "polcy", "model.polcy: no such key. Did you mean policy?"),
        ("data", "dataset", "dataset: no such key. Did you mean data?"),
        ("model", "modl", "modl: no such key. Did you mean model?"),
    ],
)
def test_a_mistyped_key_is_named_before_the_one_that_is_missing(
    key, given, error, tmp_path, capsys
):
    path = tmp_path / "my.yaml"
    path.write_text(WHOLE.replace(f"{key}:", f"{given}:"))
    assert main(["fit", f"--config={path}"]) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_flat_config_of_trl_is_told_where_its_first_key_belongs(tmp_path, capsys):
    path = tmp_path / "trl.yaml"
    path.write_text("model_name_or_path: some/model\nlearning_rate: 1.0e-5\nnum_generations: 4\n")
    assert main(["fit", f"--config={path}"]) == 2
    error = "error: model_name_or_path: no such key. Set model.policy.path.\n"
    assert capsys.readouterr().err == error
