"""``lit-grpo plan`` as a user runs it, on devices that are not here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from needs import needs_torchao
from torch.optim import SGD
from transformers import LlamaConfig

from lit_grpo.__main__ import main

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


SIXTEEN = [
    f"--data.init_args.{name}=16" for name in ("prompts_per_step", "train_size", "validation_size")
]
BFLOAT16 = ["--model.policy.dtype=bfloat16", "--trainer.precision=bf16-mixed"]


class AtRandom(SGD):
    """Has the attribute of torchao's optimizers."""

    bf16_stochastic_round = True


@pytest.fixture(autouse=True)
def here(here) -> Path:
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    return here


def plan(capsys, *arguments: str) -> tuple[int, dict]:
    exit_code = main(["plan", "--config=base.yaml", "--offline", "--json", *arguments])
    captured = capsys.readouterr()
    assert "error" not in captured.err, captured.err
    return exit_code, json.loads(captured.out)


def big(*arguments: str) -> list[str]:
    return [f"--model.policy.architecture={json.dumps(LLAMA_8B)}", *SIXTEEN, *arguments]


def part(found: dict, name: str) -> float:
    return next(one["bytes"] for one in found["memory"]["parts"] if one["name"] == name)


def test_a_model_that_does_not_fit_is_exit_code_1_and_says_what_to_set(capsys):
    exit_code, found = plan(capsys, *big("--gpus=H100"))
    assert (exit_code, found["fits"]) == (1, False)
    assert found["parameters"] == 8_030_261_248
    assert part(found, "weights") - 4 * 8_030_261_248 in range(10**6)
    assert any("model.policy.lora" in one for one in found["memory"]["advice"])
    assert any("Memory does not fit" in line for line in found["notes"])


def test_the_same_model_fits_when_it_is_divided(capsys):
    strategy = ["--trainer.strategy=fsdp2", "--trainer.precision=bf16-mixed"]
    exit_code, found = plan(capsys, *big("--gpus=8xH100", "--nodes=2", *strategy))
    assert (exit_code, found["fits"]) == (0, True)
    assert (found["gpus_per_node"], found["nodes"], found["strategy"]) == (8, 2, "fsdp2")
    assert part(found, "gradients") == round(4 * 8_030_261_248 / 16)


def test_seconds_are_printed_by_part_with_what_binds(capsys):
    _, found = plan(capsys, *big("--gpus=8xH100", "--trainer.strategy=fsdp2"))
    names = [one["name"] for one in found["seconds"]["parts"]]
    assert names == [
        "generation: prompts",
        "generation: tokens",
        "scoring",
        "update",
        "weight sync",
    ]
    assert found["seconds"]["total"] == pytest.approx(
        sum(one["seconds"] for one in found["seconds"]["parts"])
    )
    assert found["seconds"]["binding"] in names


def test_the_tables_have_every_part(capsys):
    assert main(["plan", "--config=base.yaml", "--gpus=A100-40", "--offline"]) == 0
    shown = capsys.readouterr().out
    for words in ("memory of a rank", "time of a rollout step", "keys and values", "A100-40"):
        assert words in shown
    assert "Memory fits" in shown
    assert "of 37.4 GiB a rank" in shown  # 95% of 39.4
    assert "The largest part is CUDA" in shown


def test_parameters_have_the_unit_of_their_size(capsys):
    small = ["plan", "--config=base.yaml", "--offline", "--gpus=1xH100"]
    main([*small, "--model.policy.lora={rank: 4}"])
    shown = " ".join(capsys.readouterr().out.split())
    assert re.match(r"[\d.]+ k parameters, [\d.]+ k of them trained on ", shown)


def test_overrides_are_those_of_fit(capsys):
    _, one = plan(capsys, "--gpus=H100")
    _, kl = plan(capsys, "--gpus=H100", "--model.objective.kl.coef=0.1")
    assert part(kl, "reference") == part(one, "weights")
    names = {entry["name"] for entry in kl["seconds"]["parts"]}
    assert "logprobs of the reference" in names
    _, less = plan(capsys, "--gpus=H100", "--optimizer_bytes=2")
    assert part(less, "optimizer") == 2 * one["trained_parameters"]


@pytest.mark.slow
def test_shorter_completions_change_the_seconds_and_not_the_memory(capsys):
    _, long = plan(capsys, *big("--gpus=H100"))
    _, short = plan(capsys, *big("--gpus=H100", "--completion_tokens=1"))
    assert short["memory"] == long["memory"]
    assert short["seconds"]["total"] < long["seconds"]["total"]


@pytest.mark.slow
def test_without_a_gpu_this_machine_is_measured(capsys):
    exit_code, found = plan(capsys)
    assert (exit_code, found["device"]) == (0, "cpu")
    assert found["seconds"]["total"] > 0
    assert found["memory"]["parts"][0]["name"] == "Python and libraries"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus=8xH900"], "gpus must be a number and a device, such as 8xH100"),
        (["--gpus=H100", "--trainer.strategy=xla"], "strategy must be auto, ddp, fsdp2 or"),
        (["--gpus=H100", "--nodes=0"], "nodes must be >= 1, got 0"),
        (["--gpus=H100", "--model.policy.architecture=null"], "needs either a path"),
        (["--gpus=H100", "--model.policy.path=./none"], "no model could be loaded from './none'"),
    ],
)
def test_what_is_not_known_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["plan", "--config=base.yaml", "--offline", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.strategy=fsdp"], "strategy must be auto, ddp, fsdp2 or deepspeed_stage_1"),
        (["--trainer.strategy=deepspeed"], "deepspeed_stage_1, _2, _3, _2_offload or _3_offload"),
        (["--trainer.precision=bf16-true"], "precision must be 32-true or bf16-mixed"),
        ([*BFLOAT16, "--trainer.strategy=deepspeed_stage_2"], "float32 under DeepSpeed"),
        (
            [
                "--trainer.strategy=deepspeed_stage_3",
                "--model.policy.lora.target_modules=[lm_head]",
            ],
            "model.policy.lora must leave the output layer as it is in stage 3 of DeepSpeed",
        ),
        (
            [*BFLOAT16, f"--model.optimizer={__name__}.AtRandom", "--model.optimizer.lr=1"],
            "bf16_stochastic_round must be false on several processes, got true on 2",
        ),
        (["--gpus=3xH100"], "prompts_per_step must be a positive multiple of 3"),
        ([*SIXTEEN, "--data.validation_batch_size=3"], "validation_batch_size must be a positive"),
        (
            ["--gpus=4xH100", *SIXTEEN, "--data.validation_size=2"],
            "too few held-out prompts: 2; one batch",
        ),
        (["--model.engine=VLLMEngine"], "VLLMEngine needs a run with a single process"),
        (
            ["--nodes=2", "--model.engine=VLLMServerEngine", "--model.engine.launch={}", *SIXTEEN],
            "launch.host must be an address of rank 0's machine",
        ),
        (["--trainer.gradient_clip_val=1"], "gradient_clip_val must be null"),
        (["--model.sampling.max_tokens=128"], "max_tokens must be below the model's 128 positions"),
        (["--model.optimizer.betas=[2,2]"], "optimizer must be one that can be made"),
    ],
)
def test_what_fit_refuses_is_not_planned(arguments, message, capsys):
    assert main(["plan", "--config=base.yaml", "--offline", "--gpus=2xH100", *arguments]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("error: ")
    assert message in shown


SEVEN_B = LLAMA_8B | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def on_one_gpu(*arguments: str) -> list[str]:
    """Full training of 7B with bfloat16 weights."""
    return [
        f"--model.policy.architecture={json.dumps(SEVEN_B)}",
        "--model.policy.gradient_checkpointing=true",
        *BFLOAT16,
        "--gpus=H100",
        *arguments,
    ]


@pytest.mark.parametrize(
    ("optimizer", "exit_code", "state_bytes"),
    [
        (["--optimizer_bytes=2"], 0, 2),
        (["--optimizer_bytes=4"], 0, 4),
        (["--model.optimizer=MasterAdamW"], 1, 12),
    ],
)
def test_full_training_of_7b_on_one_gpu_needs_a_small_state(
    optimizer, exit_code, state_bytes, capsys
):
    code, found = plan(capsys, *on_one_gpu(*optimizer))
    assert (code, found["fits"]) == (exit_code, exit_code == 0)
    assert part(found, "weights") - 2 * 7_615_616_512 in range(10**6)
    state = state_bytes * found["parameters"]
    assert part(found, "optimizer") == pytest.approx(state, rel=1e-6)


@needs_torchao
@pytest.mark.parametrize("name", ["AdamW8bit", "_AdamW"])
def test_an_optimizer_of_torchao_is_planned_on_one_gpu_and_refused_on_several(name, capsys):
    optimizer = [
        f"--model.optimizer=torchao.optim.{name}",
        "--model.optimizer.bf16_stochastic_round=true",
    ]
    code, found = plan(capsys, *on_one_gpu(*optimizer))
    assert (code, found["fits"]) == (0, True)
    state = {"AdamW8bit": 2, "_AdamW": 4}[name] * found["parameters"]
    assert part(found, "optimizer") == pytest.approx(state, rel=0.02)
    arguments = on_one_gpu(*optimizer, "--gpus=2xH100")
    assert main(["plan", "--config=base.yaml", "--offline", *arguments]) == 2
    assert "bf16_stochastic_round must be false on several" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_without_its_tokenizer_is_planned_with_prompts_of_an_assumed_length(here, capsys):
    LlamaConfig(**LLAMA_8B).save_pretrained(here / "model")
    model = ["--model.policy.architecture=null", "--model.policy.path=./model"]
    _, found = plan(capsys, "--gpus=H100", *model)
    assert found["parameters"] == 8_030_261_248
    assert any("tokenizer could not be read: all prompts" in one for one in found["notes"])
    assert any("taken to have 512 tokens" in one for one in found["notes"])
    rows = {"train": "rows.jsonl", "prompts_per_step": 2, "max_prompt_tokens": 64}
    data = json.dumps({"class_path": "PromptData", "init_args": rows})
    (here / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    _, found = plan(capsys, "--gpus=H100", *model, f"--data={data}")
    assert any("taken to have 64 tokens" in one for one in found["notes"])


LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


@pytest.mark.slow
def test_the_advice_for_a_model_that_is_far_too_large_makes_it_fit(capsys):
    model = f"--model.policy.architecture={json.dumps(LLAMA_70B)}"
    _, found = plan(capsys, model, "--gpus=1xH100")
    everything, adapter = found["memory"]["advice"]
    devices = re.search(r"at least \d+ GPUs \((--gpus \S+) (--nodes \d+)\)", everything)
    assert "set trainer.strategy to fsdp2" in everything
    assert adapter.startswith("train an adapter on a bfloat16 model")
    assert "It fits if you" in " ".join(found["notes"])
    settings = [model, *(one.replace(" ", "=") for one in devices.groups())]
    settings.append("--trainer.strategy=fsdp2")
    words = {
        "gradient_checkpointing": "--model.policy.gradient_checkpointing=true",
        "bf16-mixed": "--trainer.precision=bf16-mixed",
        "engines/vllm_server": "--config=engines/vllm_server",
    }
    settings += [argument for word, argument in words.items() if word in everything]
    assert "with launch: null and the urls of servers on other machines" in everything
    settings.append("--model.engine.init_args.launch=null")
    settings.append('--model.engine.init_args.urls=["http://10.0.0.1:8000"]')
    sizes = ("prompts_per_step=24", "train_size=24", "validation_size=0")
    settings += [f"--data.init_args.{size}" for size in sizes]
    exit_code, larger = plan(capsys, *settings)
    assert (exit_code, larger["fits"]) == (0, True)


def test_what_is_offloaded_is_said_by_node(capsys):
    _, found = plan(capsys, *big("--gpus=8xH100", "--trainer.strategy=deepspeed_stage_2_offload"))
    assert "A node needs 150 GiB of host memory" in " ".join(found["notes"])
    assert "without offloading, which is not known" in found["notes"][-1]


def test_a_warm_up_can_be_planned(here, capsys):
    model = {key: BASE["model"][key] for key in ("policy", "sampling")}
    (here / "base.yaml").write_text(yaml.safe_dump(BASE | {"model": model}))
    _, found = plan(capsys, "--gpus=H100")
    names = [one["name"] for one in found["seconds"]["parts"]]
    assert names == ["update"]
