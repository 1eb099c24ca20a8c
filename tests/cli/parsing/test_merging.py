FIRST = """
model:
  policy: {architecture: {model_type: llama, hidden_size: 32, rope_parameters: {rope_theta: 9}}}
data: {class_path: PromptData, init_args: {train: t.jsonl, where: {src: a}, columns: {answer: x}}}
"""


def test_mappings_of_files_are_merged_key_by_key(of_files):
    second = """
model: {policy: {architecture: {num_hidden_layers: 2, rope_parameters: {rope_type: default}}}}
data: {init_args: {where: {level: [1, 3]}, columns: {answer: y}}}
"""
    config = of_files(FIRST, second)
    assert config["model"]["policy"]["init_args"]["architecture"] == {
        "model_type": "llama",
        "hidden_size": 32,
        "rope_parameters": {"rope_theta": 9, "rope_type": "default"},
        "num_hidden_layers": 2,
    }
    assert config["data"]["init_args"]["where"] == {"src": "a", "level": [1, 3]}
    assert config["data"]["init_args"]["columns"] == {"answer": "y"}
    third = "data: {init_args: {where: {src: b}}}"
    config = of_files(FIRST, second, third, arguments=["--data.where.level=2"])
    assert config["data"]["init_args"]["where"] == {"src": "b", "level": 2}


def test_another_architecture_and_null_replace_a_mapping(of_files):
    other = """
model: {policy: {architecture: {model_type: gpt2, n_embd: 32}}}
data: {init_args: {where: null}}
"""
    config = of_files(FIRST, other, "data: {init_args: {where: {level: 1}}}")
    assert config["model"]["policy"]["init_args"]["architecture"] == {
        "model_type": "gpt2",
        "n_embd": 32,
    }
    assert config["data"]["init_args"]["where"] == {"level": 1}


def test_the_sources_of_a_mixture_are_replaced_with_their_filters(of_files):
    source = "{{class_path: MixtureSource, init_args: {{data: {}}}}}"
    data = "{{class_path: PromptData, init_args: {{train: t.jsonl, where: {{{}: 1}}}}}}"
    mixture = "data: {{class_path: MixtureData, init_args: {{sources: {{a: {}}}}}}}"
    files = [mixture.format(source.format(data.format(name))) for name in ("x", "y")]
    config = of_files("model: {policy: {path: p}}", *files)
    (only,) = config["data"]["init_args"]["sources"].values()
    assert "'y': 1" in str(only)
    assert "'x': 1" not in str(only)
