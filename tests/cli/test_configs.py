import pytest

from lit_grpo.cli.configs import BUNDLED, bundled_configs, find_config, look_at


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(directory, **texts):
    for name, text in texts.items():
        (directory / f"{name}.yaml").write_text(text)


def test_configs_come_first_in_order_and_other_arguments_keep_theirs(tmp_path):
    write(tmp_path, base="seed_everything: 1", more="seed_everything: 2")
    arguments = ["--a", "1", "-c", "base.yaml", "--b=2", "--config=more.yaml", "--run_dir", "x"]
    assert look_at(arguments).arguments == (
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
    assert look_at(["--config=base.yaml", "--config=more.yaml"]).name == "base-more"
    assert look_at([]).name == ""


def test_run_dir_and_ckpt_path_come_from_the_last_place_that_gives_them(tmp_path):
    write(tmp_path, base="run_dir: one", more="run_dir: two\nckpt_path: last")
    files = ["--config=base.yaml", "--config=more.yaml"]
    assert look_at(files).run_dir == "two"
    assert look_at(files).ckpt_path == "last"
    assert look_at([*files, "--run_dir=three", "--ckpt_path", "x.ckpt"]).run_dir == "three"
    assert look_at([*files, "--run_dir=three", "--ckpt_path", "x.ckpt"]).ckpt_path == "x.ckpt"
    assert look_at(files[:1]).ckpt_path is None


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ("model: {group_size: 8}", ["--model.group_size=4"], False),
        ("model: {group_size: 8}", ["--model.class_path=my.Module"], True),
        ("model: {group_size: 8}", ["--model", "my.Module"], True),
        ("model: {class_path: my.Module}", [], True),
        ("model: my.Module", [], True),
        ("model:", [], False),
    ],
)
def test_a_model_class_is_noticed_in_files_and_arguments(config, arguments, expected, tmp_path):
    write(tmp_path, my=config)
    assert look_at(["--config=my.yaml", *arguments]).has_model_class is expected


def test_every_bundled_config_is_found_with_and_without_its_suffix():
    for name in bundled_configs():
        assert find_config(name) == find_config(f"{name}.yaml") == BUNDLED / f"{name}.yaml"


def test_a_file_of_the_working_directory_comes_before_a_bundled_one(tmp_path):
    write(tmp_path, quickstart="a: 1")
    assert find_config("quickstart.yaml").resolve() == tmp_path / "quickstart.yaml"


def test_an_unknown_config_names_the_nearest_and_lists_all():
    with pytest.raises(ValueError, match=r"quickstrat: no such config\. Did you mean quickstart\?"):
        find_config("quickstrat")
    with pytest.raises(ValueError, match=", ".join(bundled_configs())):
        find_config("quickstrat.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  a: 1\n b: [\n", "my.yaml, line 3: expected <block end>"),
        ("a: 'x", "my.yaml, line 1: found unexpected end of stream"),
        ("- 1", "my.yaml: a config must be a mapping of keys to values, got a list."),
        ("", "my.yaml: a config must be a mapping of keys to values, got nothing."),
        ("a: \x00", "my.yaml: cannot be read as YAML"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_the_place(text, message, tmp_path):
    write(tmp_path, my=text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        look_at(["--config=my.yaml"])
    assert message in str(raised.value)


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "HF_TOKEN", "azure_client_secret"])
def test_an_interpolated_secret_is_refused_wherever_it_stands(variable, tmp_path):
    secret = f"${{oc.env:{variable}}}"
    write(tmp_path, my=f"a: [{{b: '{secret}'}}]  # and the rest")
    with pytest.raises(ValueError, match=rf"my\.yaml: \${{oc\.env:{variable}}} would end up"):
        look_at(["--config=my.yaml"])
    with pytest.raises(ValueError, match="the command line: "):
        look_at([f"--a={secret}"])


def test_other_environment_variables_may_be_interpolated(tmp_path):
    write(tmp_path, my="a: ${oc.env:USER}\nb: ${oc.env:TOKENIZERS_PARALLELISM,false}")
    look_at(["--config=my.yaml"])
