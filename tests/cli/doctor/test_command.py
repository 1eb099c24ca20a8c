"""``lit-grpo doctor`` as a user runs it: configs that can start, and one that each check fails."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from doctor_runs import doctor, engine, policy_from, rewarded, write_rows
from http_answers import answering
from judge_server import JudgeServer, judges
from needs import needs_deepspeed
from terminal import shown_in_terminal
from tiny import LLAMA, tiny_policy

from lit_grpo.__main__ import main
from lit_grpo.cli.commands import BUNDLED
from lit_grpo.cli.doctor import command
from lit_grpo.cli.doctor.command import summary
from lit_grpo.cli.doctor.findings import State

HUGE = {**LLAMA, "hidden_size": 2**15, "intermediate_size": 2**17, "num_hidden_layers": 100}
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


def test_a_run_that_can_start_is_0_and_says_what_it_will_do(here, capsys):
    exit_code, shown = doctor(capsys, "--trainer.max_steps=8")
    assert exit_code == 0
    assert shown["summary"].strip().startswith("Ready to start")
    assert "2 prompts x 2 completions (model.group_size) = 4 completions" in shown["batch"]
    assert "1 optimizer step per rollout step, each from at most 1 micro-batch" in shown["batch"]
    assert "An epoch of 8 prompts has 4 rollout steps; the run has 8 (2 epochs)." in shown["batch"]
    _, others = doctor(capsys, "--trainer.max_steps=8", "--data.prompts_per_step=3")
    left_out = "An epoch of 8 prompts has 2 rollout steps, which leave out 2 (others in each); the"
    assert left_out in others["batch"]
    assert "8 training prompts, 2 held-out prompts" in shown["data"]
    assert "correct can score every training prompt" in shown["data"] or "math" in shown["data"]
    assert {"versions", "model", "memory", "disk", "engine", "credentials"} <= shown.keys()
    assert [path.name for path in here.iterdir()] == ["base.yaml"]


def test_a_wrong_config_is_the_same_line_as_for_fit(capsys):
    lines = []
    for name in ("fit", "doctor"):
        assert main([name, "--config=base.yaml", "--model.group_sise=4"]) == 2
        lines.append(capsys.readouterr().err)
    assert lines[0] == lines[1]
    assert lines[0].startswith("error: model.group_sise")


def test_rewards_that_are_missing_are_named_as_by_fit(here, capsys):
    model = {key: value for key, value in BASE["model"].items() if key != "rewards"}
    (here / "base.yaml").write_text(yaml.safe_dump(BASE | {"model": model}))
    for name in ("fit", "doctor"):
        assert main([name, "--config=base.yaml"]) == 2
        assert "error: model.rewards: required, but not set" in capsys.readouterr().err
    (here / "base.yaml").write_text(yaml.safe_dump(BASE | {"model": {"policy": model["policy"]}}))
    words = ["--model.rewards=[MathReward]", "--model.sampling.max_tokens=3"]
    assert main(["doctor", "--config=base.yaml", *words]) == 0
    assert "2 prompts x 8 completions" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_one_failed_check_and_the_others_go_on(capsys):
    rows = write_rows({"prompt": "1+1="})
    exit_code, shown = doctor(capsys, *policy_from("./nowhere/final"), *rows)
    assert exit_code == 1
    assert "there is no such directory" in shown["model"]
    assert "Set model.policy.path" in shown["model"]
    assert "1 rows can be read" in shown["data"]
    assert "Not checked" in shown["memory"]
    assert "2 prompts x 2 completions" in shown["batch"]
    assert shown["summary"].strip() == "Do not start yet: model failed."


def test_a_model_without_weights_is_failed(here, capsys):
    tiny_policy().save_pretrained(here / "model")
    (here / "model" / "model.safetensors").unlink()
    exit_code, shown = doctor(capsys, *policy_from("model"))
    assert exit_code == 1
    assert "model has a config but no weights" in shown["model"]


def test_half_of_a_file_of_weights_is_failed(here, capsys):
    tiny_policy().save_pretrained(here / "model")
    file = here / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    exit_code, shown = doctor(capsys, *policy_from("model"))
    assert exit_code == 1
    assert "model/model.safetensors is damaged or was not copied whole" in shown["model"]


def test_a_model_that_does_not_fit_is_failed_and_names_settings(capsys):
    exit_code, shown = doctor(capsys, f"--model.policy.architecture={json.dumps(HUGE)}")
    assert exit_code == 1
    assert shown["memory"].strip().startswith("failed memory Needs at most about")
    assert (
        "To save memory, train an adapter instead of all weights (model.policy.lora"
        in (shown["memory"])
    )
    assert "Do not start yet:" in shown["summary"]


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{"prompt": None, "answer": "2"}], {}, "must hold text or a list of messages"),
        ([{"prompt": " ", "answer": "2"}], {}, "must hold text or a list of messages"),
        ([{"prompt": "1+1=", "answer": None}], {}, "1 of 9 rows have no gold answer"),
        ([{"prompt": "1+1=", "answer": "to be or not to be"}], {}, "every gold answer must be"),
        ([{"prompt": "1" * 200, "answer": "2"}], {}, "the model has only 128 positions"),
        ([], {"prompts_per_step": 100}, "too few prompts: 8"),
    ],
)
def test_data_that_cannot_be_trained_on_is_a_failed_check(rows, settings, words, capsys):
    exit_code, shown = doctor(capsys, *write_rows(*ROWS, *rows, **settings))
    assert exit_code == 1
    assert words in shown["data"]
    assert shown["summary"].strip() == "Do not start yet: data failed."


def test_leaked_repeated_and_dropped_rows_are_remarks(capsys):
    rows = [*ROWS, ROWS[0], {"prompt": "1" * 50, "answer": "2"}]
    Path("held_out.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    data = write_rows(*rows, validation="held_out.jsonl", max_prompt_tokens=20)
    exit_code, shown = doctor(capsys, *data)
    assert exit_code == 0
    assert "1 of 1 held-out prompts are training prompts, too" in shown["data"]
    assert "1 of 9 training prompts repeat others" in shown["data"]
    assert "train data: 10 rows, 1 of them dropped" in shown["data"]
    assert "longest 4 (data.max_prompt_tokens: 20)" in shown["data"]
    assert "with remarks on" in shown["summary"]


def watching(kind: str, monitor: str) -> str:
    callback = {"class_path": kind, "init_args": {"monitor": monitor}}
    return f"--trainer.callbacks={json.dumps([callback])}"


@pytest.mark.parametrize("kind", ["EarlyStopping", "Checkpoints"])
def test_a_misspelt_metric_of_a_callback_is_failed_as_by_fit(kind, capsys):
    exit_code, shown = doctor(capsys, watching(kind, "val/acuracy"))
    assert exit_code == 1
    assert f"{kind} watches val/acuracy, which nothing logs." in shown["batch"]
    assert "the best by" not in shown["batch"]
    assert shown["summary"].strip() == "Do not start yet: batch failed."
    assert main(["fit", "--config=base.yaml", watching(kind, "val/acuracy")]) == 2
    (*_, error) = capsys.readouterr().err.splitlines()
    assert error.removeprefix("error: ") in shown["batch"]


def test_without_a_validation_a_metric_of_it_is_failed_and_a_best_checkpoint_a_remark(capsys):
    none = "--data.validation_size=0"
    exit_code, shown = doctor(capsys, watching("EarlyStopping", "val/accuracy"), none)
    assert exit_code == 1
    assert "no validation will run. Set data.validation" in shown["batch"]
    exit_code, shown = doctor(capsys, watching("Checkpoints", "reward/mean"), none)
    assert exit_code == 0
    assert "Checkpoints watches reward/mean at each validation, but no" in shown["batch"]
    assert "the best by" not in shown["batch"]


def test_the_metric_of_the_best_checkpoint_is_shown(capsys):
    exit_code, shown = doctor(capsys, watching("Checkpoints", "val/accuracy"))
    assert exit_code == 0
    assert "the last 2 are kept, and the best by val/accuracy." in shown["batch"]


def test_a_disk_that_is_too_small_is_failed(monkeypatch, capsys):
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    exit_code, shown = doctor(capsys)
    assert exit_code == 1
    assert "where 0.000977 KiB are free" in shown["disk"]
    assert "Set run_dir to a directory with more space" in shown["disk"]


def test_a_server_that_does_not_answer_is_failed_and_not_asked_offline(capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        served = engine("VLLMServerEngine", urls=[url])
        exit_code, shown = doctor(capsys, served)
        assert exit_code == 1
        assert f"{url} does not answer as a server of VLLMServerEngine" in shown["engine"]
        assert "VLLM_SERVER_DEV_MODE=1" in shown["engine"]
        exit_code, shown = doctor(capsys, served, "--offline")
    assert exit_code == 0
    assert f"{url} not asked (--offline)" in shown["engine"]


def test_a_server_is_asked_for_its_version_model_and_length(capsys):
    replies = {
        "GET /health": {},
        "GET /weight_info": {"weight_version": "3"},
        "GET /version": {"version": "0.32.0"},
        "GET /v1/models": {"data": [{"id": "llama", "max_model_len": 5}]},
    }
    with answering(replies) as url:
        exit_code, shown = doctor(capsys, engine("VLLMServerEngine", urls=[url]))
    assert exit_code == 1
    assert f"{url} answers: version 0.32.0, model llama, weights" in shown["engine"]
    assert "Start it with --served-model-name policy." in shown["engine"]
    assert "the engine takes 5 tokens of prompt and completion together" in shown["engine"]


@pytest.mark.parametrize(
    ("logprob", "code", "said"),
    [
        (0.0, 0, "reports processed_logprobs, as its sampled tokens show"),
        (-0.1, 1, "reports raw_logprobs, but the run expects processed_logprobs"),
    ],
)
def test_a_server_is_asked_for_the_logprobs_that_it_reports(logprob, code, said, capsys):
    def generate(body):
        assert body["sampling_params"]["top_k"] == 1
        choice = {
            "index": 0,
            "token_ids": [7],
            "logprobs": {"content": [{"logprob": logprob}]},
            "finish_reason": "length",
            "weight_versions": [{"version": "3", "start": 0, "end": 1}],
        }
        return 200, f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()

    replies = {
        "GET /health": {},
        "GET /weight_info": {"weight_version": "3"},
        "GET /v1/models": {"data": [{"id": "policy"}]},
        "POST /inference/v1/generate": generate,
    }
    with answering(replies) as url:
        exit_code, shown = doctor(capsys, engine("VLLMServerEngine", urls=[url]))
    assert f"{url} {said}" in shown["engine"]
    assert exit_code == code


def test_a_server_that_samples_nothing_is_a_remark(capsys):
    replies = {"GET /health": {}, "GET /weight_info": {"weight_version": "3"}}
    with answering(replies) as url:
        exit_code, shown = doctor(capsys, engine("VLLMServerEngine", urls=[url]))
    assert exit_code == 0
    assert "so which logprobs it reports is not known" in shown["engine"]


def test_groups_that_a_launched_server_refuses_are_an_error(capsys):
    launch = {"flags": {"max-num-seqs": 3}}
    arguments = [engine("VLLMServerEngine", launch=launch), "--model.group_size=4"]
    assert main(["doctor", "--config=base.yaml", *arguments]) != 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "model.group_size must be <= 3 with the max-num-seqs of the servers, got 4" in said
    assert "Set model.engine.init_args.launch.flags.max-num-seqs" in said


def test_a_server_that_cannot_be_launched_names_the_program(capsys):
    exit_code, shown = doctor(capsys, engine("VLLMServerEngine", launch={"python": "no/python"}))
    assert exit_code == 1
    assert "there is no program no/python" in shown["engine"]
    assert "Set model.engine.init_args.launch.python." in shown["engine"]
    exit_code, shown = doctor(
        capsys, engine("SGLangEngine", launch={"python": sys.executable}), "--trainer.max_steps=1"
    )
    assert "has no package sglang" in shown["engine"] or "sglang" in shown["engine"]


def test_sampling_that_an_engine_cannot_do_is_failed(capsys):
    exit_code, shown = doctor(
        capsys,
        engine("VLLMServerEngine", urls=["http://127.0.0.1:1"]),
        "--model.sampling.top_p=0.9",
    )
    assert exit_code == 1
    assert "top_p must be 1 and top_k 0 with vLLM" in shown["engine"]


def judged(server_url: str, **settings) -> str:
    judge = {"model": "m", "base_url": server_url, "auth": "none"} | settings
    return rewarded("JudgeReward", judge=judge)


def test_a_blind_judge_is_failed_and_asked_nothing_offline(capsys):
    with JudgeServer(judges("answer", lambda request, one: {"score": 5})) as server:
        exit_code, shown = doctor(capsys, judged(f"{server.url}/v1"), "--offline")
        assert exit_code == 0
        assert server.requests == []
        assert "1 judge(s) not asked (--offline)" in shown["judge"]
        _, shown = doctor(capsys, judged(f"{server.url}/v1"), "--offline", "--probe")
        assert "Not tried (--offline): it would ask a judge" in shown["probe"]
        assert server.requests == []
        exit_code, shown = doctor(capsys, judged(f"{server.url}/v1"))
    assert exit_code == 1
    assert "the judge does not tell good from bad" in shown["judge"]
    assert f"model m at {server.url}/v1" in shown["credentials"]


def test_a_missing_key_of_a_judge_is_failed(monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    exit_code, shown = doctor(capsys, judged("http://127.0.0.1:1/v1", auth="key"), "--offline")
    assert exit_code == 1
    assert "must be in the environment variable OPENAI_API_KEY" in shown["credentials"]


def test_a_cache_of_a_judge_that_cannot_be_written_is_failed(here, capsys):
    (here / "afile").touch()
    arguments = judged("http://127.0.0.1:1/v1", cache="afile"), "--offline"
    exit_code, shown = doctor(capsys, *arguments)
    assert exit_code == 1
    assert "judge.cache must be a place that can be written, got afile" in shown["disk"]


def test_an_exception_in_a_check_is_a_failed_check_and_the_others_go_on(monkeypatch, capsys):
    def broken(subject):
        return {}["nothing"]

    monkeypatch.setitem(command.CHECKS, "batch", (broken,))
    exit_code, shown = doctor(capsys)
    assert exit_code == 1
    assert "failed batch unexpectedly raised KeyError: 'nothing' (" in shown["batch"]
    assert re.search(r"test_command.py, line \d+\). Fix that line", shown["batch"])
    assert "Needs at most" in shown["memory"]


def test_a_probe_says_whether_there_is_a_signal_and_how_long_the_run_takes(capsys):
    low = "--model.rewards=[small_runs.ShareOfLowBytes]"
    exit_code, shown = doctor(capsys, "--probe", low, "--model.group_size=4")
    assert exit_code == 0
    found = re.search(r"16 completions of 4 prompts: the rewards differ in (\d+)%", shown["probe"])
    assert found
    assert int(found[1]) > 0
    assert re.search(r"tokens/s; a rollout step of 8 completions takes about .* the run about",
                     shown["probe"])  # fmt: skip
    assert shown["probe"].count("Sampled for prompt 'addition:") == 2
    two = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    exit_code, shown = doctor(capsys, "--probe", *two)
    assert "on 2 processes with 1 each" in shown["batch"]
    assert "a rollout step of 2 completions" in shown["probe"]
    assert exit_code == 1  # random weights stop nowhere
    assert "There is no signal: every reward is exactly 0" in shown["probe"]


@needs_deepspeed
def test_what_stage_3_of_deepspeed_refuses_is_failed(capsys):
    words = ["--trainer.devices=2", "--trainer.strategy=deepspeed_stage_3"]
    exit_code, shown = doctor(capsys, *words, "--model.policy.compile=true")
    assert exit_code == 1
    assert "policy.compile must be false in stage 3 of DeepSpeed" in shown["batch"]
    exit_code, shown = doctor(capsys, *words, "--model.policy.lora.target_modules=[lm_head]")
    assert exit_code == 1
    assert "must leave the output layer as it is in stage 3 of DeepSpeed" in shown["memory"]


def test_a_warm_up_is_checked_too(here, capsys):
    warm = BASE | {"model": {"policy": BASE["model"]["policy"]}}
    (here / "warm.yaml").write_text(yaml.safe_dump(warm))
    exit_code, shown = doctor(capsys, "--model.sampling.max_tokens=3", config="warm.yaml")
    assert exit_code == 0
    assert "2 prompts with their targets per batch" in shown["batch"]


@pytest.mark.slow
def test_a_missing_login_of_wandb_is_failed_and_offline_is_a_remark(here, importer):
    words = ["doctor", "--config=base.yaml", "--trainer.logger=WandbLogger"]
    alone = {"WANDB_API_KEY": "", "NETRC": "nowhere", "HOME": str(here)}
    found = {}
    for mode in ("online", "offline"):
        with importer.running(words, here, **alone, WANDB_MODE=mode) as started:
            found[mode] = started.wait()[0], (here / "said.txt").read_text()
    assert found["online"][0] == 1
    assert "wandb needs a login, and there is none. Run `wandb login`" in found["online"][1]
    assert found["offline"][0] == 0
    assert "wandb is offline" in found["offline"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["debug", "quickstart", "quickstart_sft", "gsm8k", "rubric_8b"])
def test_every_bundled_experiment_can_be_checked(name, capsys):
    assert (BUNDLED / f"{name}.yaml").is_file()
    exit_code, shown = doctor(capsys, "--offline", config=name)
    assert exit_code in (0, 1)
    assert not any("unexpectedly raised" in text for text in shown.values())


@pytest.mark.slow
def test_in_a_terminal_the_list_is_as_wide_as_the_terminal(here, importer):
    lines = shown_in_terminal(importer, "doctor", "--config=base.yaml", cwd=here, columns=80)
    assert any(re.match(r"ok +batch +2 prompts x 2 completions", line) for line in lines)
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_the_summary_names_what_failed_or_what_is_remarked_on():
    found = {"data": {State.OK, State.REMARK}, "disk": {State.OK}}
    assert summary(found) == "Ready to start, with remarks on data."
    assert summary(found | {"disk": {State.FAILED}}) == "Do not start yet: disk failed."


@pytest.mark.parametrize("run_dir", ["afile", "afile/run", "dangling"])
def test_a_run_dir_that_is_a_file_is_refused_with_the_sentence_of_fit(run_dir, here, capsys):
    (here / "afile").touch()
    (here / "dangling").symlink_to(here / "nowhere")
    assert main(["fit", "--config=base.yaml", f"--run_dir={run_dir}"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("error: ")
    assert line.startswith("run_dir must be a directory that can be written, got ")
    exit_code, shown = doctor(capsys, f"--run_dir={run_dir}")
    assert exit_code == 1
    assert line in shown["disk"]
    assert "disk failed" in shown["summary"]
