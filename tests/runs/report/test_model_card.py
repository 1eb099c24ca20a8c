"""The model card, after small runs of the command line and of the Python trainer."""

from __future__ import annotations

import logging
import re
import sys

import pandas as pd
import pytest
import yaml
from cli_base import BASE
from huggingface_hub import ModelCard
from PIL import Image
from run_logs import close_logs, workplace
from small_runs import make_module, make_trainer
from tiny import tiny_policy

from lit_grpo import AdditionData, PromptData, SFTModule, Trainer
from lit_grpo.__main__ import main
from lit_grpo.data import MixtureData, MixtureSource
from lit_grpo.objective import AdvantageConfig, Objective
from lit_grpo.policy import LoRA, Policy
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rollout import Sampling
from lit_grpo.runs.files.event_log import Event, append_event, now
from lit_grpo.runs.report import model_card
from lit_grpo.runs.report.model_card import MIN_STEPS_OF_CURVES, write_model_card


def fit(run_dir, module, data=None, max_steps=2):
    data = data or AdditionData(1, train_size=4, validation_size=2, prompts_per_step=2)
    settings = {"accelerator": "cpu", "enable_progress_bar": False, "max_steps": max_steps}
    try:
        Trainer(run_dir, **settings).fit(module, data)
    finally:
        close_logs()
    return ModelCard.load(run_dir / "final/README.md")


@pytest.fixture(scope="module")
def commanded(tmp_path_factory):
    """A run of the command line with an evaluation before and after its two steps."""
    root = tmp_path_factory.mktemp("commanded")
    (root / "run.yaml").write_text(yaml.safe_dump(BASE))
    options = ["--model.evaluation.before_training=true", "--trainer.val_check_interval=2"]
    options += ["--trainer.check_val_every_n_epoch=null", "--run_dir=run"]
    with workplace(root):
        assert main(["fit", "--config=run.yaml", *options]) == 0
    return root / "run", ModelCard.load(root / "run/final/README.md")


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A model directory whose card names a model on the Hub."""
    directory = tmp_path_factory.mktemp("base")
    tiny_policy().save_pretrained(directory)
    (directory / "README.md").write_text("---\nbase_model: someone/tiny\n---\n\nAfter SFT.\n")
    return directory


def settings(card):
    return yaml.safe_load(re.search(r"````yaml\n(.*?)````", card.text, re.DOTALL)[1])


def results(card):
    rows = re.findall(r"^\| ([\w -]+) \| ([\d.]+) \| ([\d.]+|–) \|$", card.text, re.MULTILINE)
    return {name: (float(first), float(last.replace("–", "nan"))) for name, first, last in rows}


def test_the_card_of_a_command_has_its_method_rewards_data_and_whole_config(commanded):
    run_dir, card = commanded
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["lit-grpo", "grpo"]
    assert card.data.base_model is None
    assert "# GRPO from a llama model with random weights" in card.text
    assert "- **Method:** GRPO: groups of 2, surrogate clip" in card.text
    assert "- **Rewards:** math\n" in card.text
    assert "- **Data:** AdditionData\n" in card.text
    assert settings(card) == yaml.safe_load((run_dir / "config.yaml").read_text())


def test_the_results_are_the_first_and_the_last_of_the_run(commanded):
    run_dir, card = commanded
    metrics = pd.read_csv(run_dir / "metrics.csv")
    for name, metric in {"Held-out accuracy": "val/accuracy", "Reward": "reward/mean"}.items():
        values = metrics[metric].dropna()
        assert results(card)[name] == pytest.approx((values.iloc[0], values.iloc[-1]), abs=1e-3)


def test_a_run_of_some_length_has_its_curves_in_the_card(tmp_path, commanded):
    assert "curves.png" not in commanded[1].text  # of two steps
    card = fit(tmp_path, make_module(group_size=2), max_steps=MIN_STEPS_OF_CURVES)
    assert "![Curves of the training](curves.png)" in card.text
    assert Image.open(tmp_path / "final/curves.png").width > 500


def test_a_picture_that_cannot_be_drawn_leaves_the_card(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(model_card, "MIN_STEPS_OF_CURVES", 1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not installed
    monkeypatch.delitem(sys.modules, "lit_grpo.runs.report.curves", raising=False)
    card = fit(tmp_path, make_module(group_size=2))
    assert "curves.png" not in card.text
    assert "Reward" in results(card)
    assert "no curves.png was written (ModuleNotFoundError" in caplog.text


def test_the_code_of_the_card_loads_the_model(commanded, monkeypatch):
    run_dir, card = commanded
    monkeypatch.chdir(run_dir / "final")
    names = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], names)
    assert names["model"].config.model_type == "llama"
    assert names["tokenizer"]("1+1=")["input_ids"] == byte_tokenizer()("1+1=")["input_ids"]


def test_without_a_config_the_card_shows_the_settings_of_the_module(tmp_path):
    card = fit(tmp_path, make_module(group_size=2))
    shown = settings(card)
    assert shown["group_size"] == 2
    assert shown["objective"]["surrogate"] == "clip"
    assert shown["optimizer"] == {"class_path": "SGD", "lr": 1.0}
    assert shown["max_steps"] == 2
    assert "- **Rewards:** share_of_low_bytes\n" in card.text
    assert "Reward" in results(card)


def test_a_change_is_told_once_though_its_resume_was_killed_and_repeated(tmp_path):
    change = "model.group_size: 2 -> 4"
    for changes in ([change, "trainer.max_steps: 2 -> 3"], [change]):
        append_event(tmp_path, Event(time=now(), step=1, kind="resume", changes=changes))
    module = make_module(group_size=2)
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, AdditionData(1, train_size=4, validation_size=0, prompts_per_step=2))
    write_model_card(tmp_path, tmp_path, trainer, module)
    card = ModelCard.load(tmp_path / "README.md").text
    assert "- **Changed at resumes:** model.group_size 2 -> 4 after step 1\n" in card


def test_a_change_in_steps_that_were_left_behind_is_not_told(tmp_path):
    for step, changes in (
        (0, []),
        (2, ["model.seed: 0 -> 1"]),
        (5, ["model.group_size: 2 -> 4"]),
        (7, ["model.optimizer.lr: 1.0 -> 0.5"]),
        (5, []),  # it went back, with the settings of that checkpoint
    ):
        kind = "resume" if step else "start"
        append_event(tmp_path, Event(time=now(), step=step, kind=kind, changes=changes))
    trainer, module = make_trainer(max_steps=1), make_module(group_size=2)
    trainer.fit(module, AdditionData(1, train_size=4, validation_size=0, prompts_per_step=2))
    write_model_card(tmp_path, tmp_path, trainer, module)
    card = ModelCard.load(tmp_path / "README.md").text
    assert "- **Changed at resumes:** model.seed 0 -> 1 after step 2\n" in card


def soft_clip(inputs, objective):
    return -inputs.ratio * inputs.advantages


def whole_loss(inputs, objective):
    return -(inputs.ratio * inputs.advantages * inputs.mask).sum()


def centered(table):
    return (table.rewards - table.rewards.nanmean(1, keepdim=True)).nan_to_num()


def test_functions_in_the_objective_and_the_advantage_are_shown_by_their_path(tmp_path):
    own = {
        "objective": Objective(surrogate=soft_clip),
        "advantage": AdvantageConfig(function=centered),
    }
    card = fit(tmp_path, make_module(group_size=2, **own))
    shown = settings(card)
    assert shown["objective"]["surrogate"] == f"{__name__}.soft_clip"
    assert shown["objective"]["kl"]["coef"] == 0
    assert shown["advantage"]["function"] == f"{__name__}.centered"
    method = f"surrogate {__name__}.soft_clip, aggregation token, advantage function"
    assert f"{method} {__name__}.centered, KL coefficient 0\n" in card.text


def test_a_function_that_is_the_whole_loss_is_shown_by_its_path(tmp_path):
    card = fit(tmp_path, make_module(group_size=2, objective=Objective(function=whole_loss)))
    assert settings(card)["objective"]["function"] == f"{__name__}.whole_loss"
    method = f"groups of 2, objective function {__name__}.whole_loss, baseline "
    assert method in card.text


def test_rows_given_in_python_are_counted_and_not_copied_into_the_card(tmp_path):
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    card = fit(tmp_path, make_module(group_size=2), PromptData(train=rows, prompts_per_step=2))
    assert "- **Data:** PromptData: 4 rows given in Python\n" in card.text
    assert "2+1=" not in card.text


def test_the_sources_of_a_mixture_are_listed(tmp_path):
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    sources = {"sums": AdditionData(1, train_size=4, validation_size=2), "own": PromptData(rows)}
    data = MixtureData(
        {name: MixtureSource(data=one) for name, one in sources.items()}, prompts_per_step=2
    )
    card = fit(tmp_path, make_module(group_size=2), data)
    own = "own = PromptData: 4 rows given in Python"
    assert f"- **Data:** MixtureData: sums = AdditionData; {own}\n" in card.text


def test_sft_is_named_and_has_no_reward(tmp_path, base_model):
    sampling = Sampling(max_tokens=8)
    card = fit(tmp_path, SFTModule(Policy(str(base_model)), sampling=sampling))
    assert card.data.tags == ["lit-grpo", "sft"]
    assert card.data.base_model == "someone/tiny"
    assert f"- **Start:** {base_model}\n" in card.text
    assert "Reward" not in card.text
    assert results(card).keys() == {"Held-out accuracy", "SFT loss"}


def test_an_adapter_names_its_package_and_base(tmp_path, base_model):
    settings = {"architecture": None, "path": str(base_model), "merge_lora": False}
    module = make_module(group_size=2, policy=settings | {"lora": LoRA(rank=4)})
    card = fit(tmp_path, module)
    assert card.data.library_name == "peft"
    assert card.data.base_model == "someone/tiny"
    assert "- **Adapter:** LoRA of rank 4\n" in card.text
    assert "the package `peft`" in card.text


def test_a_card_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        write_model_card(tmp_path, tmp_path, make_trainer(), module=None)
    assert "no model card was written (AttributeError" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_secret_of_the_config_is_not_in_the_card(tmp_path):
    (tmp_path / "keyed.py").write_text(
        "from lit_grpo import Reward\n\n\nclass Keyed(Reward):\n"
        "    def __init__(self, api_key: str, place: str, **settings):\n"
        "        super().__init__(**settings)\n\n"
        "    def score(self, prompt, completion):\n        return float(len(completion.text) % 2)\n"
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    settings = "{api_key: sk-hidden, place: shown-here}"
    rewards = f"[{{class_path: keyed.Keyed, init_args: {settings}}}]"
    with workplace(tmp_path):
        assert (
            main(["fit", "--config=run.yaml", f"--model.rewards={rewards}", "--run_dir=run"]) == 0
        )
    card = (tmp_path / "run/final/README.md").read_text()
    assert "shown-here" in card
    assert "sk-hidden" not in card
