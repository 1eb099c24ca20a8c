import pytest

from lit_grpo.cli.parsing.invocation import read_invocation


def write(directory, **texts):
    for name, text in texts.items():
        (directory / f"{name}.yaml").write_text(text)


def test_configs_come_first_and_other_arguments_keep_their_order(tmp_path):
    write(tmp_path, base="seed_everything: 1", more="seed_everything: 2")
    arguments = ["--a", "1", "-c", "base.yaml", "--b=2", "--config=more.yaml", "--run_dir", "x"]
    assert read_invocation(arguments).arguments == (
        "--config=base.yaml",
        "--config=more.yaml",
        "--a",
        "1",
        "--b=2",
        "--run_dir",
        "x",
    )


def test_a_run_is_named_after_all_its_configs(tmp_path):
    write(tmp_path, base="a: 1", more="b: 2")
    assert read_invocation(["--config=base.yaml", "--config=more.yaml"]).name == "base-more"
    assert read_invocation([]).name == ""


def test_run_dir_and_ckpt_path_come_from_the_last_source_that_sets_them(tmp_path):
    write(tmp_path, base="run_dir: one", more="run_dir: two\nckpt_path: last")
    files = ["--config=base.yaml", "--config=more.yaml"]
    assert read_invocation(files).run_dir == "two"
    assert read_invocation(files).ckpt_path == "last"
    assert read_invocation([*files, "--run_dir=three", "--ckpt_path", "x.ckpt"]).run_dir == "three"
    assert (
        read_invocation([*files, "--run_dir=three", "--ckpt_path", "x.ckpt"]).ckpt_path == "x.ckpt"
    )
    assert read_invocation(files[:1]).ckpt_path is None


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ("model: {group_size: 8}", ["--model.group_size=4"], False),
        ("model: {group_size: 8}", ["--model.class_path=my.Module"], True),
        ("model: {group_size: 8}", ["--model", "my.Module"], True),
        ("model: {class_path: my.Module}", [], True),
        ("model: my.Module", [], True),
    ],
)
def test_a_model_class_is_noticed_in_files_and_arguments(config, arguments, expected, tmp_path):
    write(tmp_path, my=config)
    assert read_invocation(["--config=my.yaml", *arguments]).has_model_class is expected


BUILT = "model: {policy: {architecture: {model_type: llama}}}"


@pytest.mark.parametrize(
    ("config", "arguments", "is_replaced"),
    [
        (BUILT, ["--model.policy.path=x"], True),
        (BUILT, ["--model.policy.path", "x", "--a=1"], True),
        ("model: {init_args: {policy: {init_args: {architecture: {a: 1}}}}}",
         ["--model.policy.path=x"], True),
        (BUILT, [], False),
        (BUILT, ["--model.policy.path=null"], False),
        (BUILT, ["--model.policy.path=x", "--model.policy.architecture.model_type=qwen3"], False),
        ("model: {policy: {path: y}}", ["--model.policy.path=x"], False),
    ],
)  # fmt: skip
def test_a_path_on_the_command_line_replaces_the_architecture_of_a_config(
    config, arguments, is_replaced, tmp_path
):
    write(tmp_path, my=config)
    found = read_invocation(["--config=my.yaml", *arguments]).arguments
    added = ["--model.policy.architecture=null"] if is_replaced else []
    assert found == ("--config=my.yaml", *arguments, *added)


def test_two_presets_are_refused():
    with pytest.raises(ValueError, match="at most one preset, got dapo and gspo"):
        read_invocation(["--config=presets/dapo", "--config", "presets/gspo"])


SMALL = """
model: {policy: {architecture: {model_type: llama, hidden_size: 32}}}
data: {class_path: PromptData, init_args: {train: t.jsonl}}
"""


def test_seed_everything_is_the_seed_of_what_has_none_of_its_own(of_files):
    def seeds(*texts: str, arguments=()) -> tuple:
        config = of_files(*texts, arguments=arguments)
        both = config["model"]["seed"], config["data"]["init_args"]["seed"]
        return config["seed_everything"], *both

    assert seeds(SMALL) == (0, 0, 0)
    assert seeds(SMALL, arguments=["--seed_everything=3"]) == (3, 3, 3)
    assert seeds(SMALL, "seed_everything: 4") == (4, 4, 4)
    assert seeds(SMALL, "model: {seed: 0}", arguments=["--seed_everything=3"]) == (3, 0, 3)
    assert seeds(SMALL, arguments=["--seed_everything=3", "--data.seed", "5"]) == (3, 3, 5)
    assert seeds(SMALL, "model: {seed: '${seed_everything}'}") == (0, 0, 0)
