"""A training run whose completions cannot end says so once, and is not told to teach the ends."""

from types import SimpleNamespace

import pytest
from chat_models import TEMPLATE, qwen_tokenizer
from small_runs import Keep, fit, make_module
from transformers import AutoConfig

from lit_grpo.callbacks import HealthMonitor, ZeroRewardBreaker
from lit_grpo.objective import Objective
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rewards import Reward
from lit_grpo.rollout import Sampling
from lit_grpo.training.checks.end_tokens import check_ends
from lit_grpo.types import UserError

NOTHING = "nothing ends a completion: neither the tokenizer nor the model's config has"


class Zero(Reward):
    def score(self, prompt, completion):
        return 0.0


def without_eos(tokenizer):
    tokenizer.eos_token = None
    return tokenizer


def warning(tokenizer, eos=None, objective=Objective(), **sampling) -> str:  # noqa: B008 - frozen
    model = SimpleNamespace(
        config=AutoConfig.for_model("llama", vocab_size=258),
        generation_config=SimpleNamespace(eos_token_id=eos),
    )
    return check_ends(model, tokenizer, Sampling(max_tokens=6, **sampling), objective)


def test_without_an_end_each_completion_has_all_tokens():
    said = warning(without_eos(byte_tokenizer()))
    assert said.startswith(NOTHING)
    assert "Each will have model.sampling.max_tokens (6) tokens" in said
    assert "set tokenizer.eos_token" in said


@pytest.mark.parametrize(
    ("tokenizer", "eos", "sampling"),
    [
        (byte_tokenizer(), None, {}),
        (byte_tokenizer(), 2, {}),
        (without_eos(byte_tokenizer()), 256, {}),  # <eos> is still special
        (without_eos(qwen_tokenizer(TEMPLATE)), None, {}),
        (without_eos(byte_tokenizer()), None, {"stop": ("\n",)}),
        (without_eos(byte_tokenizer()), 2, {"stop_token_ids": (7,)}),
    ],
)
def test_any_end_will_do(tokenizer, eos, sampling):
    assert warning(tokenizer, eos, **sampling) == ""


@pytest.mark.parametrize("id", [258, -1])
def test_a_stop_that_the_model_never_samples_is_refused(id):
    with pytest.raises(UserError, match=rf"tokens of the model, 0 to 257, got {id}, which it nev"):
        warning(byte_tokenizer(), stop_token_ids=(7, id))


def test_an_end_that_is_text_to_the_tokenizer_is_named():
    tokenizer = without_eos(byte_tokenizer())
    said = warning(tokenizer, [tokenizer("#")["input_ids"][0], 256])
    assert said.startswith("completions end with token 2 ('#'), the eos_token_id of the model's")


def test_completions_without_an_end_cannot_all_be_filtered():
    with pytest.raises(UserError, match=f"{NOTHING}.*overlong_filtering none would be trained"):
        warning(without_eos(byte_tokenizer()), objective=Objective(overlong_filtering=True))


def test_the_run_is_warned_at_the_start_and_not_told_to_teach_the_end(tmp_path, caplog):
    without_eos(byte_tokenizer()).save_pretrained(tmp_path)
    module = make_module(
        policy={"tokenizer": str(tmp_path)}, rewards=[Zero()], sampling=Sampling(max_tokens=4)
    )
    keep, breaker = Keep(), ZeroRewardBreaker(alert_after=1, stop_after=2)
    fit(module, callbacks=[HealthMonitor(), breaker, keep], max_steps=2)
    completions = keep.outputs[0]["rollouts"].completions
    assert {one.finish_reason for one in completions} == {"length"}
    assert caplog.text.count(NOTHING) == 1
    assert "No reward for 1 rollout steps in a row" in caplog.text
    assert "cut off" not in caplog.text
