"""What a user sees after a mistake: all cases run in one process that has no classes of tests."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import cli_base
import pytest
import yaml
from paths import SUPPORT
from processes import run_program
from run_logs import workplace
from tiny import LLAMA

from lit_grpo.__main__ import main

BASE = {
    "run_dir": "run",
    "trainer": {"accelerator": "cpu", "max_steps": 1},
    "model": {"policy": {"architecture": LLAMA}, "rewards": ["MathReward"]},
    "data": {"class_path": "AdditionData", "init_args": {"num_digits": 2}},
}

MODULES = {
    "broken_import": "import nothing_here\n",
    "broken_syntax": "class MyReward:\n    def score(:\n",
    "broken_name": "x = 1\ny = zz\n",
    "broken_key": "{}['a']\n",
    "broken_value": "int('a')\n",
    "mine": (
        "from lit_grpo.training.grpo import GRPOModule\n"
        "class MyGRPO(GRPOModule):\n"
        "    def __init__(self, *args, extra: int = 0, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        "def half(completions, **columns):\n"
        "    return [0.5] * len(completions)\n"
        "from lit_grpo.rewards import Reward\n"
        "class Untyped(Reward):\n"
        "    def __init__(self, path):\n"
        "        super().__init__()\n"
        "    def score(self, prompt, completion):\n"
        "        return 1.0\n"
        "class Plain:\n"
        "    def __call__(self, completions, **columns):\n"
        "        return [0.5] * len(completions)\n"
        "class Scores:\n"
        "    def score(self, prompt, completion):\n"
        "        return 1.0\n"
        "plain = Plain()\n"
    ),
}

CHILD = """
import contextlib, io, json, sys
from lit_grpo.__main__ import importing
with importing():
    from lit_grpo.cli.app import run
import pytest
from parsers import reuse_parsers
reuse_parsers(pytest.MonkeyPatch())
answers = []
for arguments in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        answers.append((run("fit", arguments), stderr.getvalue()))
print(json.dumps(answers))
"""

ARGUMENTS = {
    "--trainer.max_stepz=3": "trainer.max_stepz: no such key. Did you mean max_steps?",
    "--seed 3": "seed: no such key. Set seed_everything",
    "--trainer.max_time 1h": "trainer.max_time must be days, hours, minutes and seconds as",
    "--trainer.max_time 3600": "got 3600. Set trainer.max_time. One hour is '00:01:00:00'.",
    "--trainer.max_steps 1e3": "trainer.max_steps: expected int, got 1000.0. Write 1000.",
    "--model.objective.kl 0.05": "got 0.05. Set model.objective.kl.coef to it.",
    "--model.beta 0.05": "model.beta: no such key. Set model.objective.kl.coef.",
    "--model.num_generations 4": "model.num_generations: no such key. Set model.group_size.",
    "--model.optimizer.learning_rate 1": "AdamW.learning_rate: no such key. Did you mean lr?",
    "--trainer.callbacks+=FormatReward": (
        "trainer.callbacks: FormatReward is a reward. Put it into model.rewards: "
        "--model.rewards+=FormatReward."
    ),
    "--trainer.callbacks+=HealthMonitor --trainer.callbacks.rules.truncated.action=stopp": (
        "an action is one of ignore, warn, alert, skip, roll_back, stop"
    ),
    "--trainer.callbacks+=HealthMonitor --trainer.callbacks.rules.truncated=stop": (
        "as in {truncated: {action: stop}}"
    ),
    "--trainer.max_stepz 3": "trainer.max_stepz: no such key. Did you mean max_steps?",
    "--trainr.max_steps=3": "trainr.max_steps: no such key. Did you mean trainer.max_steps?",
    "--trainr.max_stepz=3": "trainr.max_stepz: no such key. Did you mean trainer?",
    "--model.rewards [mine.Untyped]": "mine.Untyped needs path, which is not set. Set path in its",
    "--trainer.max_steps -5": "trainer.max_steps must be >= -1, got -5 (-1 sets no limit). Set",
    "--trainer.max_steps 2.5": "trainer.max_steps: expected int, got 2.5.",
    "--trainer.limit_train_batches 1.5": "must be a whole number, or from 0.0 to 1.0, got 1.5 (a",
    "--trainer.devices 1.5": "trainer.devices must be auto, or the number of devices from 1",
    "--trainer.devices 0": "trainer.devices must be auto, or the number of devices from 1",
    "--trainer.strategy dp": "trainer.strategy must be auto, ddp, fsdp2 or deepspeed_stage_1, _2,",
    "--model.policy.config.x 8": "model.policy: Policy.config.x: no such key.",
    "--model.policy.architectur.x 8": "architectur.x: no such key. Did you mean architecture?",
    "--model.policy.dtype.x 8": "one of float32, bfloat16, got the key x under it.",
    "--model.group_size.x 8": "model.group_size: expected int, got the key x under it.",
    "--run_dir=''": "run_dir must be a directory, got an empty string",
    "--model.policy.lora 8": "model.policy: Policy.lora: expected the keys of LoRA, got 8.",
    "--model.optimizer -1": "model.optimizer: expected a class, got -1.",
    "--model.optimizer 3e-4": "got 3e-4. The learning rate is model.optimizer.lr.",
    "--model.optimizer=0.0003": "got 0.0003. The learning rate is model.optimizer.lr.",
    "--model.optimizer=3.0e-4": "got 3.0e-4. The learning rate is model.optimizer.lr.",
    "--model.optimizer=[1]": "model.optimizer: expected a class, got [1].",
    "--model.rewards MathReward,LengthReward": (
        "got MathReward,LengthReward. Write the list in brackets: '[MathReward,LengthReward]'."
    ),
    "--model.sampling.stop x": "expected list[str], got x. A list of one is '[x]'.",
    "--model.engine=my.py:Mine": "MyClass, got my.py:Mine. Write my.Mine.",
    "--model.rewards '[{class_path: my.py:Mine}]'": "got my.py:Mine. Write my.Mine.",
    "--model.rewards MathRewrd": "got MathRewrd. Did you mean '[MathReward]'?",
    "--model.lr 1e-4": "model.lr: no such key. Did you mean model.optimizer.lr?",
    "--model.weight_decay 0": "no such key. Did you mean model.optimizer.weight_decay?",
    "--model.rank 8": "model.rank: no such key. Did you mean model.policy.lora.rank?",
    "--train_size 8": "train_size: no such key. Did you mean data.train_size?",
    "--model.optimizer.lr -1e-4": "optimizer.lr must be a positive number, got -0.0001. Set model.",
    "--model.optimizer.lr=0": "optimizer.lr must be a positive number, got 0",
    "--model.optimizer.lr nan": "model.optimizer: AdamW.lr: expected float, got nan.",
    "--model.objective.kl.coef -1e-3": "objective.kl.coef must be >= 0, got -0.001",
    "--trainer.max_steps=three": "trainer.max_steps: expected int, got three.",
    "--trainer.max_steps": "trainer.max_steps: expected one argument",
    "--model.group_sise=3": "model.group_sise: no such key. Did you mean group_size?",
    "--model.sampling.temprature=1": (
        "model.sampling.temprature: no such key. Did you mean temperature?"
    ),
    "--model.sampling='{max_tokens: six}'": "model.sampling.max_tokens: expected int, got six.",
    "--model.sampling='{max_token: 6}'": (
        "model.sampling.max_token: no such key. Did you mean max_tokens?"
    ),
    "--model.objective='{kl: {refresh_every: 1.5}}'": (
        "model.objective.kl.refresh_every: expected int or null, got 1.5."
    ),
    "--model.objective='{kl: {coef: null}}'": (
        "kl.coef: expected float, got null. Remove it for the default, or write it: 0.0."
    ),
    "--model.sampling=no_file.yaml": (
        "model.sampling: expected keys under it (temperature, top_p, top_k, max_tokens, …), got "
        "no_file.yaml."
    ),
    "--model.sampling='{a: [}'": (
        "model.sampling: expected keys under it (temperature, top_p, top_k, max_tokens, …), got "
        "{a: [}."
    ),
    "--model.engine=HFEngin": "model.engine: no class is called HFEngin. Did you mean HFEngine?",
    "--model.teacher.paht=x": ("model.teacher: LocalTeacher.paht: no such key. Did you mean path?"),
    "--model.teacher.url=[http://a]": (
        "model.teacher: VLLMTeacher.url: no such key. Did you mean urls?"
    ),
    "--model.teacher.urls=http://a": "model.teacher: VLLMTeacher.urls: expected list[str], got http://a",
    "--model.optimizer.lr=1e-3x": "AdamW.lr: expected float, got 1e-3x.",
    "--model.policy.path=x --model.policy.architecture.model_type=llama": (
        "Set one of model.policy.path and model.policy.architecture"
    ),
    "--model.objective.surrogate=clp": (
        "model.objective.surrogate: expected clip, cispo, sapo, gmpo, vespo, dppo, none or the "
        "path of a function, such as my_file.my_function, got clp. Did you mean clip?"
    ),
    "--model.advantage.function=mine.hal": (
        "model.advantage.function: expected null or the path of a function, such as "
        "my_file.my_function, got mine.hal: module 'mine' has no attribute 'hal'. Did you mean "
        "half?"
    ),
    "--model.advantage.function=nowhere.half": (
        "model.advantage.function: expected null or the path of a function, such as "
        "my_file.my_function, got nowhere.half: No module named 'nowhere'."
    ),
    "--model.objective.sampler_masks=[{}]": (
        "model.objective.sampler_masks: expected the keys of SamplerMask, got {}."
    ),
    "--model.engine=Unlike": (
        "model.engine: no class is called Unlike. Known: HFEngine, SGLangEngine, VLLMEngine, "
        "VLLMServerEngine."
    ),
    "--model.engine=ServedEngine": (
        "model.engine: ServedEngine is only the base class of others. Choose from HFEngine, "
        "SGLangEngine, VLLMEngine, VLLMServerEngine."
    ),
    "--model.engine=lit_grpo.data.AdditionData": (
        "model.engine: expected RolloutEngine or null, got lit_grpo.data.AdditionData."
    ),
    "--model.optimizer=AdamW --model.optimizer.lrr=1": (
        "model.optimizer: AdamW.lrr: no such key. Did you mean lr?"
    ),
    "--model.policy.lora=true": "expected the keys of LoRA, got true. Write {} for its defaults.",
    "--model.optimizer=AdamWW": "model.optimizer: no class is called AdamWW. Did you mean AdamW?",
    "--data=AditionData": "data: no class is called AditionData. Did you mean AdditionData?",
    "--data.num_digitz=1": "data: AdditionData.num_digitz: no such key. Did you mean num_digits?",
    "--data.num_digits=0": "num_digits must be >= 1, got 0. Set data.num_digits.",
    "--data.num_digits=x": "data: AdditionData.num_digits: expected int, got x.",
    "--seed_everything=x": "seed_everything: expected bool or int, got x.",
    "--seed_everything=-1": "seed_everything must be >= 0, got -1. Set seed_everything.",
    "--seed_everything=true": (
        "seed_everything must be a whole number >= 0, got true (true and false would count as the "
        "numbers 1 and 0). Set seed_everything."
    ),
    "--trainer.max_steps=+010": (
        "trainer.max_steps: YAML reads +010 as 8. Write 8 if that is meant, else 10."
    ),
    "--trainer.max_steps 1:30": (
        "trainer.max_steps: YAML reads 1:30 as 90. Write 90 if that is meant, else '1:30' in "
        "quotes."
    ),
    "--data.num_digits=1:30": "data: AdditionData.num_digits: YAML reads 1:30 as 90.",
    "--data.num_digits 0_10": "data: AdditionData.num_digits: YAML reads 0_10 as 8.",
    "--model.optimizer.lr=1:30": "model.optimizer: AdamW.lr: expected float, got 1:30.",
    "--model.policy.lora.rank=1:30": "LoRA.rank: YAML reads 1:30 as 90.",
    "--model.policy.lora='{rank: 010}'": (
        "the command line: YAML reads 010 as 8. Write 8 if that is meant, else 10."
    ),
    "--lr=1e-4": "lr: no such key. Did you mean model.optimizer.lr?",
    "--model.lr=1e-4": "model.lr: no such key. Did you mean model.optimizer.lr?",
    "--model.rewards='[{class_path: mine.half}]'": (
        "model.rewards: mine.half is not a Reward. A function is given as {class_path: "
        "FunctionReward, init_args: {function: mine.half}}."
    ),
    "--model.rewards [mine.Plain]": (
        "model.rewards: mine.Plain is not a Reward. A class with __call__ is given as an object of "
        "it: write plain = Plain() in mine, and give mine.plain."
    ),
    "--model.rewards='[{class_path: mine.plain}]'": (
        "model.rewards: mine.plain is not a Reward. An object with __call__ is given as "
        "{class_path: FunctionReward, init_args: {function: mine.plain}}."
    ),
    "--model.rewards [mine.Scores]": (
        "model.rewards: mine.Scores is not a Reward. Derive it from lit_grpo.rewards.Reward, and "
        "define score(self, prompt, completion)."
    ),
    "--trainer.precision fp16": "trainer.precision: expected 32-true or bf16-mixed, got fp16.",
    "--trainer.precision=16-mixed": (
        "trainer.precision must be 32-true or bf16-mixed, got 16-mixed (float16 gradients would be "
        "clipped before they are unscaled). Set trainer.precision."
    ),
    "--model.rewards='[{class_path: MathReward, init_args: weight:2}]'": (
        "model.rewards: init_args of lit_grpo.MathReward must be keys with their values, got a "
        "string. Write each as KEY: VALUE, with a space after the colon."
    ),
    "--model.policy.lora='{r: 8}'": (
        "model.policy: Policy.lora: LoRA.r: no such key. Did you mean rank?"
    ),
    "--model.policy.loras {}": "model.policy: Policy.loras: no such key. Did you mean lora?",
    "--model.objective='{kll: {}}'": "model.objective.kll: no such key. Did you mean kl?",
    "--print_confg": "print_confg: no such key. Did you mean print_config?",
    "base.yaml": "base.yaml: unexpected argument. Each file needs the word before it: --config ba",
    "mine.py": "Several files are one list, in quotes: --data.train '[a.jsonl, mine.py]'.",
    "x" * 300: f"{'x' * 300}: unexpected argument. Use --config FILE and --KEY VALUE.",
    "stray": "stray: unexpected argument. Use --config FILE and --KEY VALUE.",
    "--allow_changes true": "Flags such as --allow_changes take no value. Leave true out.",
    "--config": "-c/--config: expected one argument",
    "--trainer.default_root_dir=${run_dri}/x": (
        "trainer.default_root_dir: ${run_dri} names no key. Did you mean run_dir?"
    ),
    "--trainer.default_root_dir=${oc.env:NO_SUCH_NAME}": (
        "trainer.default_root_dir: the environment variable NO_SUCH_NAME is not set. Set it, or "
        "give a value to take without it: ${oc.env:NO_SUCH_NAME,VALUE}"
    ),
    "--trainer.default_root_dir=elsewhere": (
        "trainer.default_root_dir must be null, got elsewhere (all files of a run are in its "
        "run_dir). Set run_dir."
    ),
    "--trainer.logger wandb": "got wandb. Did you mean WandbLogger?",
    "--trainer.default_root_dir=${run_dir": (
        "trainer.default_root_dir: cannot interpolate: no viable alternative at input '${run_dir'"
    ),
    "--model.class_path=mine.MyGRPO --model.extra=x": "model: MyGRPO.extra: expected int, got x.",
    "--model.class_path=mine.MyGRPO --model.group_sise=4": (
        "model: MyGRPO.group_sise: no such key. Did you mean group_size?"
    ),
    "--model=mine.MyGRP": (
        "model: mine.MyGRP cannot be imported: module 'mine' has no attribute 'MyGRP'. "
        "Did you mean MyGRPO?"
    ),
    "--ckpt_path=last": "run holds no run to go on with (a relative run_dir counts from",
    "--ckpt_path=no.ckpt": "no.ckpt: no such checkpoint. Set ckpt_path to a file, to last",
}

FILES = {
    "{trainer: {max_stepz: 3}}": "trainer.max_stepz: no such key. Did you mean max_steps?",
    "{trainr: {max_steps: 3}}": "trainr: no such key. Did you mean trainer?",
    "{model: {lr: 1e-4}}": "model.lr: no such key. Did you mean model.optimizer.lr?",
    "{group_size: 3}": "group_size: no such key. Did you mean model.group_size?",
    "{model: {group_sise: 3}}": "model.group_sise: no such key. Did you mean group_size?",
    "{model: {group_size: eight}}": "model.group_size: expected int, got eight.",
    "{model: {group_size: 1}}": (
        "group_size must be >= 2, got 1 (a group of one has no baseline). Set model.group_size."
    ),
    "{model: {lr_schedule: cosin}}": (
        "model.lr_schedule: expected one of constant, linear, cosine, got cosin. "
        "Did you mean cosine?"
    ),
    "{model: {policy: {architectur: {a: 1}}}}": (
        "model.policy: Policy.architectur: no such key. Did you mean architecture?"
    ),
    "{model: {rewards: MathReward}}": (
        "model.rewards: expected list[Reward], got MathReward. A list of one is '[MathReward]'."
    ),
    "{trainer: {accumulate_grad_batches: 2}}": (
        "trainer.accumulate_grad_batches must be 1, got 2 (GRPO takes its optimizer steps itself). "
        "Set trainer.accumulate_grad_batches. Micro-batches: "
        "model.update.max_tokens_per_micro_batch."
    ),
    "{trainer: {gradient_clip_val: 1.0}}": (
        "trainer.gradient_clip_val must be null, got 1.0 (GRPO takes its optimizer steps itself). "
        "Set trainer.gradient_clip_val. Clipping: model.update.max_grad_norm."
    ),
    "{run_dir: base.yaml/run}": (
        "run_dir must be a directory that can be written, got base.yaml/run (there is a file in "
        "its place). Set another run_dir."
    ),
    "{model: {target_column: text}}": (
        "fit needs the config of a GRPO training, and this one has model.target_column, which only "
        "SFT has. Use lit-grpo sft."
    ),
    "{model: {rewards: null}}": "model.rewards: required, but not set.",
    "{model: {rewards: [MathRewerd]}}": (
        "model.rewards: no class is called MathRewerd. Did you mean MathReward?"
    ),
    "{model: {rewards: [{class_path: MathRewerd}]}}": (
        "model.rewards: no class is called MathRewerd. Did you mean MathReward?"
    ),
    "{model: {rewards: [{class_path: MathReward, init_args: {weigt: 2}}]}}": (
        "model.rewards: MathReward.weigt: no such key. Did you mean weight?"
    ),
    "{model: {rewards: [{class_path: MathReward, weight: 2}]}}": (
        "model.rewards.0: weight must be under init_args, got it beside class_path. Write "
        "{class_path: MathReward, init_args: {weight: 2}}."
    ),
    "{model: {rewards: [{class_path: MathReward, init_args: {weight: heavy}}]}}": (
        "model.rewards: MathReward.weight: expected float, got heavy."
    ),
    "{model: {rewards: [{class_path: FormatReward}]}}": (
        "model.rewards: FormatReward.pattern: required, but not set."
    ),
    "{model: {rewards: [lit_grpo.rollout.HFEngine]}}": (
        "model.rewards: lit_grpo.rollout.HFEngine is not a Reward."
    ),
    "{model: {rewards: [no_module.MyReward]}}": (
        "model.rewards: no_module.MyReward cannot be imported: No module named 'no_module'."
    ),
    "{model: {rewards: [lit_grpo.rewards.MathRewerd]}}": (
        "model.rewards: lit_grpo.rewards.MathRewerd cannot be imported: module "
        "'lit_grpo.rewards' has no attribute 'MathRewerd'. Did you mean MathReward?"
    ),
    "{model: {rewards: [broken_import.MyReward]}}": (
        "broken_import.py, line 1: ModuleNotFoundError: No module named 'nothing_here'"
    ),
    "{model: {rewards: [broken_syntax.MyReward]}}": (
        "broken_syntax.py, line 2: SyntaxError: invalid syntax"
    ),
    "{model: {rewards: [broken_name.MyReward]}}": (
        "broken_name.py, line 2: NameError: name 'zz' is not defined"
    ),
    "{model: {rewards: [broken_key.MyReward]}}": "broken_key.py, line 1: KeyError: 'a'",
    "{model: {engine: broken_value.MyEngine}}": (
        "broken_value.py, line 1: ValueError: invalid literal for int() with base 10: 'a'"
    ),
    "{trainer: {callbacks: [EarlyStoping]}}": (
        "trainer.callbacks: no class is called EarlyStoping. Did you mean EarlyStopping?"
    ),
    "{trainer: {callbacks: {HealthMonitor: null}}}": (
        "trainer.callbacks must be a list of classes, got a mapping with the key HealthMonitor. "
        "Write callbacks: [HealthMonitor]"
    ),
    "{trainer: {callbacks: [{class_path: HealthMonitor, init_args: "
    "{rules: {truncated: {action: rollback}}}}]}}": "got rollback. Did you mean roll_back?",
    "{trainer: {callbacks: [{class_path: HealthMonitor, init_args: "
    "{rules: {truncatd: {action: stop}}}}]}}": "Did you mean truncated?",
    "{trainer: {callbacks: [{class_path: Alerts, init_args: {command: no-such-program -x}}]}}": (
        "Alerts.init_args.command must begin with a program that exists"
    ),
    "{model: {policy: Qwen/Qwen2.5-0.5B}}": (
        "model.policy: expected keys under it, got Qwen/Qwen2.5-0.5B. Set model.policy.path to it."
    ),
    "{trainer: {callbacks+: [{class_path: EarlyStopping}]}}": (
        "trainer.callbacks: EarlyStopping.monitor: required, but not set."
    ),
    "{trainer: {logger: CSVLoger}}": (
        "trainer.logger: no class is called CSVLoger. Did you mean CSVLogger?"
    ),
    "{trainer: {accelerator: gpu}}": "Set trainer.accelerator to auto or cpu.",
    "{trainer: {accelerator: gpuu}}": "You selected an invalid accelerator name",
    "{model: {optimizer: {lr: 1,5}}}": (
        "a key of the config must be text, got 5. Write decimals with a point"
    ),
    "{datas: {}}": "datas: no such key. Did you mean data?",
    "{trainer: {callback: {}}}": "trainer.callback: no such key. Did you mean callbacks?",
    "{model: {sampling: {max_token: {}}}}": (
        "model.sampling.max_token: no such key. Did you mean max_tokens?"
    ),
    "{model: {policy: {Lora: {}}}}": "model.policy: Policy.Lora: no such key. Did you mean lora?",
    "{data: {class_path: AdditionData, init_args: {digits: {}}}}": (
        "data: AdditionData.digits: no such key."
    ),
    "{model: {rewards: [{class_path: MathReward, init_args: {wight: {}}}]}}": (
        "model.rewards: MathReward.wight: no such key. Did you mean weight?"
    ),
    "{seed_everything: 010}": (
        "case.yaml, line 1: YAML reads 010 as 8. Write 8 if that is meant, else 10."
    ),
    "trainer:\n  max_time: 1:00:00:00\n": "case.yaml, line 2: YAML reads 1:00:00:00 as 216000.",
    "{seed_everything: true}": "seed_everything must be a whole number >= 0, got true",
    "{seed_everything: false}": "seed_everything must be a whole number >= 0, got false",
    "{trainer: {max_steps: '1:30'}}": "trainer.max_steps: YAML reads 1:30 as 90.",
    "{data: null}": "case.yaml: data must have keys under it, got nothing. Indent the lines",
    "{trainer: }": "case.yaml: trainer must have keys under it, got nothing. Indent the lines",
    "{data: {class_path: AdditionData, init_args: }}": (
        "case.yaml: data.init_args must have keys under it, got nothing. Indent the lines"
    ),
    "{model: {rewards: [{class_path: MathReward, init_args: }]}}": (
        "case.yaml: model.rewards.0.init_args must have keys under it, got nothing."
    ),
    "{model: {group_size: }}": (
        "model.group_size: expected int, got null. Remove it for the default, or write it: 8."
    ),
    "{model: {optimizer: }}": "got null. Remove it for the default.",
    "{model: {policy: }}": "model.policy: required, but not set.",
    "{model: {sampling: }}": (
        "model.sampling: expected keys under it (temperature, top_p, top_k, max_tokens, …), got "
        "nothing. Indent them by two spaces more, or remove it for the defaults."
    ),
    "{model: {sampling: 5}}": (
        "model.sampling: expected keys under it (temperature, top_p, top_k, max_tokens, …), got 5."
    ),
    "{model: {objective: {kl: [1]}}}": (
        "model.objective.kl: expected keys under it (estimator, coef, place, gradient, …), got [1]."
    ),
    "{model: {rewards: [{class_path: MathReward, init_args: {weight: }}]}}": (
        "MathReward.weight: expected float, got null. Remove it for the default, or write it: 1.0."
    ),
    "- a list": "case.yaml: a config must be a mapping of keys to values, got the list ['a list'].",
    "a:\n\tb: 1": "(not valid YAML). Indent with spaces: YAML takes no tabs.",
    "a:\n    b: 1\n  c: 2": "(not valid YAML). Keys of one section start in the same column",
    "a: 'x": "case.yaml, line 1: found unexpected end of stream (not valid YAML).",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int, str]]:
    directory: Path = tmp_path_factory.mktemp("mistakes")
    (directory / "base.yaml").write_text(yaml.safe_dump(BASE))
    for name, source in MODULES.items():
        (directory / f"{name}.py").write_text(source)
    cases = [["--config", "base.yaml", *shlex.split(arguments)] for arguments in ARGUMENTS]
    for number, text in enumerate(FILES):
        (directory / str(number)).mkdir()
        (directory / str(number) / "case.yaml").write_text(text)
        cases.append(["--config", "base.yaml", "--config", f"{number}/case.yaml"])
    words = [sys.executable, "-c", CHILD, json.dumps(cases)]
    child = run_program(words, directory, PYTHONPATH=str(SUPPORT))
    results = json.loads(child.stdout.splitlines()[-1])
    return dict(zip([*ARGUMENTS, *FILES], results, strict=True))


@pytest.mark.parametrize(("mistake", "line"), [*ARGUMENTS.items(), *FILES.items()])
def test_a_mistake_is_one_clear_line_and_exit_code_2(mistake, line, answers):
    exit_code, stderr = answers[mistake]
    assert exit_code == 2
    assert line in stderr
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["fit"], ["sft", "--trainer.max_steps", "2"]])
def test_a_command_without_a_config_says_what_to_give(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        "error: data: required, but not set. Give --config FILE, with a section such as "
        "data: {class_path: PromptData, init_args: {train: train.jsonl}}.\n"
    )


def test_data_without_a_class_says_how_to_name_it(here, capsys):
    base = cli_base.BASE | {"data": {"train": "rows.jsonl"}}
    Path("base.yaml").write_text(yaml.safe_dump(base))
    assert main(["fit", "--config=base.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: data: expected class_path and, under init_args, its arguments, and no other keys. "
        "In a file: data: {class_path: PromptData, init_args: {train: train.jsonl}}; without one: "
        "--data PromptData --data.train FILE.\n"
    )


def test_an_interval_longer_than_an_epoch_says_how_to_count_across_epochs(tmp_path, capsys):
    with workplace(tmp_path):
        Path("base.yaml").write_text(yaml.safe_dump(cli_base.BASE))
        assert main(["fit", "--config=base.yaml", "--trainer.val_check_interval=100"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: trainer.val_check_interval must be at most 4, got 100 (the steps of an epoch). Set "
        "trainer.val_check_interval. To count steps across epochs, set "
        "trainer.check_val_every_n_epoch to null."
    )
