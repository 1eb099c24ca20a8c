import os
import re
from pathlib import Path

import pytest

from lit_grpo.__main__ import main
from lit_grpo.cli.commands import BUNDLED, bundled_configs
from lit_grpo.cli.parsing.config_files import find_config, read_config
from lit_grpo.cli.parsing.invocation import read_invocation
from lit_grpo.types import UserError


def write(directory, **texts):
    for name, text in texts.items():
        (directory / f"{name}.yaml").write_text(text)


def test_every_bundled_config_is_found_with_and_without_its_suffix():
    for name in bundled_configs():
        assert find_config(name) == find_config(f"{name}.yaml") == BUNDLED / f"{name}.yaml"


def test_a_file_in_the_working_directory_takes_precedence_over_a_bundled_one(tmp_path):
    write(tmp_path, quickstart="a: 1")
    assert find_config("quickstart.yaml").resolve() == tmp_path / "quickstart.yaml"


def test_a_file_of_the_working_directory_is_found_without_its_ending_and_first(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "debug"):
        (tmp_path / f"{name}.yaml").write_text("run_dir: x")
        assert find_config(name).resolve() == tmp_path / f"{name}.yaml"


def test_a_directory_in_place_of_a_file_is_said_to_be_one(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="^mine is a directory.* There is no .yaml file in it"):
        find_config("mine")
    (tmp_path / "mine/base.yaml").touch()
    with pytest.raises(ValueError, match="^mine is a directory.* In it are mine/base.yaml"):
        find_config("mine")
    assert main(["prepare", "--preset", "mine", "--out", "out"]) == 2
    assert "error: mine is a directory, but a recipe is a file" in capsys.readouterr().err


def test_an_unknown_config_names_the_nearest_and_without_one_lists_all():
    for name in ("quickstrat", "quickstrat.yaml"):
        line = f"{name}: no such config. Did you mean quickstart?"
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            find_config(name)
    with pytest.raises(ValueError, match=", ".join(bundled_configs())):
        find_config("xyzzy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  a: 1\n b: [\n", "my.yaml, line 3: expected <block end>"),
        ("a: 'x", "my.yaml, line 1: found unexpected end of stream"),
        ("- 1", "my.yaml: a config must be a mapping of keys to values, got the list [1]."),
        ("", "my.yaml: a config must be a mapping of keys to values, got an empty file."),
        ("a: \x00", "my.yaml: cannot be read as YAML"),
        ("a: 2024-13-45", "my.yaml: cannot be read as YAML: month must be in 1..12"),
        (f"a: {'1' * 5000}", "my.yaml: cannot be read as YAML: Exceeds the limit"),
        (f"a: {'[' * 5000}", "my.yaml: cannot be read as YAML: it is nested too deeply"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused_with_its_line(text, message, tmp_path):
    write(tmp_path, my=text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        read_invocation(["--config=my.yaml"])
    assert message in str(raised.value)


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "HF_TOKEN", "azure_client_secret"])
def test_an_interpolated_secret_is_refused_wherever_it_stands(variable, tmp_path):
    secret = f"${{oc.env:{variable}}}"
    write(tmp_path, my=f"a: [{{b: '{secret}'}}]  # and the rest")
    with pytest.raises(ValueError, match=rf"my\.yaml: \${{oc\.env:{variable}}} would be written"):
        read_invocation(["--config=my.yaml"])
    with pytest.raises(ValueError, match="the command line: "):
        read_invocation([f"--a={secret}"])


def test_other_environment_variables_may_be_interpolated(tmp_path):
    write(tmp_path, my="a: ${oc.env:USER}\nb: ${oc.env:TOKENIZERS_PARALLELISM,false}")
    read_invocation(["--config=my.yaml"])


TWICE = """\
trainer:
  max_steps: 100
model: {group_size: 2}
trainer:
  max_epochs: 3
"""
NESTED = """\
model:
  rewards:
    - class_path: MathReward
      init_args: {weight: 1.0, weight: 0.5}
"""
MERGED = """\
basis: &basis {max_steps: 3, devices: 1}
more: &more {devices: 2}
trainer: {<<: *basis, <<: *more, max_steps: 100}
model: {policy: &policy {path: tiny}, evaluation: {accuracy: *policy}}
data: {init_args: {prompts_per_step: 2}}
data.init_args.train: rows.jsonl
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWICE, r"my\.yaml, lines 1 and 4: the key trainer must appear only once in a file"),
        (NESTED, r"my\.yaml, line 4: the key model\.rewards\.0\.init_args\.weight must appear"),
        ("trainer: {max_steps: 5}\ntrainer.max_steps: 7\n", r"lines 1 and 2: the key trainer\.max"),
        (
            "'seed': 1\nseed: 2\n",
            r"lines 1 and 2: the key seed must appear only once in a file, got",
        ),
    ],
)
def test_a_key_twice_in_a_file_is_refused_with_its_lines(text, message, tmp_path, capsys):
    write(tmp_path, my=text)
    assert main(["fit", "--config=my.yaml"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("my.yaml") == 1


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_named_with_its_line(encoding, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_bytes("run_dir: x  # Zürich\n".encode(encoding))
    assert main(["fit", "--config=my.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: my.yaml, line 1: not UTF-8. Save the file as UTF-8.\n"
    )


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_data_as_a_config_is_told_its_key(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"{name}: .*got a file of data. Set data.train to it"):
        read_config(Path(name))


def test_anchors_and_merged_mappings_are_no_repetition(tmp_path):
    write(tmp_path, my=MERGED)
    (config,) = read_invocation(["--config=my.yaml"]).configs
    assert config["trainer"]["max_steps"] == 100
    assert config["model"]["evaluation"]["accuracy"] == {"path": "tiny"}


def test_a_file_of_nearly_that_name_is_named(here):
    (here / "sums.yaml").touch()
    with pytest.raises(UserError, match=r"^sums\.yml: no such config\. Did you mean sums\.yaml\?"):
        find_config("sums.yml")


def test_the_other_configs_of_a_folder_are_listed(here):
    (here / "mine").mkdir()
    write(here / "mine", first="", second="")
    with pytest.raises(UserError, match=r"third: no such config\. In mine are .*first.yaml, .*sec"):
        find_config("mine/third")


def test_the_bare_name_of_a_preset_is_told_where_presets_are():
    with pytest.raises(UserError, match=r"dapo: no such config\. Did you mean presets/dapo\?"):
        find_config("dapo")


def test_a_pipe_is_told_that_a_config_is_a_file(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/null"):
        assert main(["fit", "--config", name]) == 2
        assert capsys.readouterr().err == (
            f"error: {name}: a config must be a file, got a pipe or a device (it is read more than "
            "once, and by each process of a run). Write it to a file, and give that.\n"
        )


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/dev/stdin"])
def test_what_a_shell_pipes_in_is_told_that_a_config_is_a_file(name, capsys):
    """As with ``--config <(cat my.yaml)`` and ``--config /dev/stdin < <(cat my.yaml)``."""
    reads, writes = os.pipe()
    os.write(writes, b"trainer: {max_steps: 1}")
    os.close(writes)
    stdin = os.dup(0)
    os.dup2(reads, 0)
    try:
        assert main(["fit", "--config", name.format(reads)]) == 2
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(reads)
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: /dev/\S+: a config must be a file, got a pipe .*\n", said)


WIDE = "\N{NO-BREAK SPACE}"
ODD = {
    f"model:\n{WIDE}{WIDE}group_size: 2\n": 2,
    f"trainer: {{}}\nmodel:\n  rewards:\n{WIDE} {WIDE} - MathReward\n": 4,
    f"model:\n  policy:\n  {WIDE}{WIDE}path: x\n": 3,
    f"model:\n  rewards:\n  -{WIDE}MathReward\n  {WIDE}- LengthReward\n": 3,
    f"run_dir: {WIDE}x\n": 1,
}


@pytest.mark.parametrize("text", ODD)
def test_a_space_of_a_web_page_is_named_with_its_line(text, tmp_path, capsys):
    write(tmp_path, my=text)
    assert main(["fit", "--config=my.yaml"]) == 2
    assert capsys.readouterr().err == (
        f"error: my.yaml, line {ODD[text]}: expected plain spaces, got U+00A0 (no-break space; it "
        "looks like a space, and web pages have it), which YAML takes for a letter. Replace each "
        "of them in the file by a space.\n"
    )


def test_such_a_space_inside_a_text_is_kept(tmp_path):
    write(tmp_path, my=f"a: '{WIDE}x'\nb: |\n  {WIDE}y\nc: 5{WIDE}km\n")
    (config,) = read_invocation(["--config=my.yaml"]).configs
    assert config == {"a": f"{WIDE}x", "b": f"{WIDE}y\n", "c": f"5{WIDE}km"}
