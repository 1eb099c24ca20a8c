"""A ``~`` in a path is the home directory, in files and on the command line."""

import pytest
import yaml
from cli_base import BASE
from jsonargparse import Namespace

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.paths import expand_home


@pytest.fixture
def home(here, monkeypatch):
    directory = here / "home"
    directory.mkdir()
    monkeypatch.setenv("HOME", str(directory))
    return directory


def test_paths_are_expanded_wherever_they_stand_and_other_texts_are_not(home):
    policy = Namespace(class_path="Policy", init_args=Namespace(path="~/model", tokenizer=None))
    config = Namespace(
        run_dir="~/runs/1",
        ckpt_path="last",
        model=Namespace(policy=policy, rewards=[Namespace(function="~/mine.py:half", name="~")]),
        data=Namespace(train="~/a.jsonl", template="~{{ prompt }}", sources={"a": {"path": "~/b"}}),
    )
    expand_home(config)
    assert (config.run_dir, config.ckpt_path) == (f"{home}/runs/1", "last")
    assert vars(policy.init_args) == {"path": f"{home}/model", "tokenizer": None}
    assert vars(config.model.rewards[0]) == {"function": f"{home}/mine.py:half", "name": "~"}
    assert (config.data.train, config.data.template) == ("~/a.jsonl", "~{{ prompt }}")
    assert config.data.sources == {"a": {"path": f"{home}/b"}}


@pytest.mark.parametrize("is_in_file", [False, True])
def test_a_run_is_written_to_the_home_directory_and_resumed_from_there(is_in_file, home, here):
    (home / "base.yaml").write_text(
        yaml.safe_dump(BASE | ({"run_dir": "~/run"} if is_in_file else {}))
    )
    arguments = ["--config=~/base.yaml", *([] if is_in_file else ["--run_dir=~/run"])]
    assert main(["fit", *arguments, "--trainer.max_steps=1"]) == 0
    assert (home / "run/final").is_dir()
    assert not (here / "~").exists()
    saved = yaml.safe_load((home / "run/config.yaml").read_text())
    assert saved["run_dir"] == str(home / "run")
    checkpoint = "--ckpt_path=~/run/checkpoints/last.ckpt"
    assert main(["fit", *arguments, "--trainer.max_steps=2", checkpoint]) == 0


def test_keys_that_contain_the_run_directory_have_it_without_the_tilde(home, printed_config, here):
    callback = {"class_path": "ModelCheckpoint", "init_args": {"filename": "${run_dir}/best"}}
    config = BASE | {"trainer": BASE["trainer"] | {"callbacks": [callback]}}
    (here / "my.yaml").write_text(yaml.safe_dump(config | {"run_dir": "~/one"}))
    for words, run in (
        ([], "one"),
        (["--run_dir=~/two"], "two"),
        (["--run_dir", "~/three"], "three"),
    ):
        printed = printed_config("--config", "my.yaml", *words)
        assert printed["run_dir"] == str(home / run)
        (shown,) = printed["trainer"]["callbacks"]
        assert shown["init_args"]["filename"] == f"{home}/{run}/best"


def test_a_run_is_resumed_by_its_directory_with_a_tilde(home, here, capsys):
    (home / "run").mkdir()
    (home / "run/config.yaml").write_text("1")
    assert main(["fit", "~/run"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {home}/run/config.yaml: a config must be a")
