import json
import re

import lightning as L
import pytest
import torch
from chat_models import ALWAYS_THINKS, IM_END, chat_prompts, qwen_policy, qwen_tokenizer
from small_runs import make_trainer
from tiny import LLAMA, prompt

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.data.prompts.prompt_format import PromptFormat, build_prompts
from lit_grpo.data.rows.sources import read_rows
from lit_grpo.policy import LoRA, Policy
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.training import Evaluation, SFTModule
from lit_grpo.types import UserError

PROMPTS = [
    prompt(f"{n}+{n}=", id=str(n), answer=str(2 * n), solution=f"{n} twice") for n in range(4)
]


def make_module(**settings) -> SFTModule:
    return SFTModule(
        Policy(architecture=LLAMA, lora=settings.pop("lora", None)),
        optimizer=settings.pop("optimizer", lambda params: torch.optim.AdamW(params, lr=2e-2)),
        evaluation=Evaluation(before_training=False),
        sampling=settings.pop("sampling", Sampling(max_tokens=64)),
        **settings,
    )


def fit(module, *callbacks, batch_size=4, **options):
    trainer = make_trainer(*callbacks, **({"max_epochs": -1} | options))
    trainer.fit(module, PromptLoader(PROMPTS, batch_size))
    return trainer.callback_metrics


def test_the_loss_is_that_of_transformers_on_the_same_tokens():
    module = make_module(optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    loss = fit(module)["sft/loss"]
    total, count = 0.0, 0
    for one in PROMPTS:
        target = [*module.tokenizer(one.answer)["input_ids"], module.tokenizer.eos_token_id]
        ids = torch.tensor([[*one.token_ids, *target]])
        labels = ids.clone()
        labels[0, : len(one.token_ids)] = -100
        total += module.policy.model(ids, labels=labels).loss.item() * len(target)
        count += len(target)
    assert loss.item() == pytest.approx(total / count, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [None, LoRA(rank=8, alpha=64, modules_to_save=["lm_head"])], ids=["full", "lora"]
)
def test_the_policy_learns_its_targets_and_where_they_end(lora):
    # At twice this rate the steps with an adapter amplify rounding errors.
    module = make_module(lora=lora, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    fit(module, max_steps=60)
    engine = HFEngine()
    engine.load_weights(module.policy, 0)
    greedy = Sampling(temperature=0.0, max_tokens=5)
    completions = dict(engine.generate(PROMPTS, 1, greedy, seed=0))
    assert [completions[n].text for n in range(4)] == ["0", "2", "4", "6"]
    assert {completion.finish_reason for completion in completions.values()} == {"stop"}


def test_accumulated_batches_take_fewer_optimizer_steps():
    module = make_module()
    fit(module, max_steps=3, batch_size=2, accumulate_grad_batches=2)
    assert module.global_step == 3


def test_the_schedule_counts_the_incomplete_accumulation_at_the_end_of_an_epoch():
    module = make_module(lr_schedule="linear", optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    rates = []

    class Rates(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(module, Rates(), batch_size=1, max_steps=-1, max_epochs=2, accumulate_grad_batches=3)
    assert module.global_step == 4  # an epoch has a step of three batches and one of one
    assert rates == pytest.approx([1, 1, 0.75, 0.5, 0.5, 0.5, 0.25, 0.0])


def test_another_column_can_be_the_target():
    module = make_module(target_column="solution")
    assert module.target(PROMPTS[3]) == "3 twice"


def test_the_log_names_what_is_imitated_once(caplog):
    caplog.set_level("INFO", logger="lit_grpo")
    fit(make_module(target_column="solution"), max_steps=2)
    (said,) = [one for one in caplog.messages if one.startswith("imitating")]
    assert re.fullmatch("imitating column solution, such as '[0-3] twice'", said)


def test_what_is_imitated_of_a_worked_answer_of_gsm8k_is_said(tmp_path):
    file = tmp_path / "rows.jsonl"
    worked = "Add them. " * 20 + "\n#### 4"
    file.write_text(json.dumps({"question": "2+2?", "answer": worked}) + "\n")
    bare, whole = make_module(), make_module(target_column="answer")
    (one,) = build_prompts(read_rows(str(file)), bare.tokenizer, PromptFormat())
    assert bare.describe_target(one) == (
        "imitating the gold answer (column answer, after ####), such as '4'; see "
        "model.target_column"
    )
    assert whole.describe_target(one) == (f"imitating column answer, such as '{worked[:79]}…'")


def test_of_a_list_of_gold_answers_the_first_is_imitated(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"prompt": "a", "answer": ["1/2", "0.5"]}\n'
        '{"prompt": "b", "reward_model": {"ground_truth": [3, 4]}}\n'
        '{"prompt": "c", "answer": "[\\"a list\\"]"}\n'
    )
    module = make_module()
    prompts = build_prompts(read_rows(str(file)), module.tokenizer, PromptFormat())
    assert [module.target(one) for one in prompts] == ["1/2", "3", '["a list"]']


@pytest.mark.parametrize("column", [None, "reasoning"])
def test_a_row_without_a_target_is_refused_with_its_id(column):
    module = make_module(target_column=column)
    with pytest.raises(ValueError, match="prompt bare has no .* Set model.target_column"):
        module.target(prompt(id="bare", answer=None))


def test_a_token_limit_beyond_the_positions_matters_only_if_something_is_sampled():
    small = Policy(architecture=LLAMA | {"max_position_embeddings": 32})
    fit(SFTModule(small), max_steps=1)
    trainer, loader = make_trainer(max_steps=1), PromptLoader(PROMPTS, 4)
    with pytest.raises(UserError, match="32 positions"):
        trainer.fit(SFTModule(small), loader, loader)
    with pytest.raises(UserError, match="max_tokens must be below the model's 32 positions"):
        make_trainer().validate(SFTModule(small), loader)


def test_a_target_without_positions_is_refused_before_anything_is_trained():
    architecture = LLAMA | {"max_position_embeddings": 20}
    module = SFTModule(Policy(architecture=architecture), sampling=Sampling(max_tokens=4))
    fits, too_long = prompt("ab", id="a", answer="c" * 17), prompt("abc", id="b", answer="c" * 17)
    make_trainer().fit(module, PromptLoader([fits], 1))
    message = (
        r"the model's 20 positions together, got 1 of 2 rows that do not: b has 3 \+ 18 tokens"
    )
    with pytest.raises(UserError, match=message):
        make_trainer().fit(
            SFTModule(Policy(architecture=architecture), sampling=Sampling(max_tokens=4)),
            PromptLoader([fits, too_long], 1),
        )


def test_all_rows_are_looked_at_before_anything_is_trained():
    module, rows = make_module(), [*PROMPTS, prompt(id="bare", answer=None)]
    with pytest.raises(ValueError, match="prompt bare has no gold answer"):
        make_trainer(max_steps=1).fit(module, PromptLoader(rows, 1, shuffle=False))
    assert module.trainer.global_step == 0


def test_a_conversation_ends_with_the_end_of_its_turn_and_the_policy_learns_it(tmp_path):
    module = SFTModule(
        qwen_policy(tmp_path),
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-2),
        evaluation=Evaluation(before_training=False),
        sampling=Sampling(max_tokens=5),
    )
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    prompts = chat_prompts(module.tokenizer, *rows)
    end = module.tokenizer.convert_tokens_to_ids(IM_END)
    assert module.target_ids(prompts[1]) == [*module.tokenizer("2")["input_ids"], end]
    make_trainer(max_epochs=-1, max_steps=40).fit(module, PromptLoader(prompts, 4))
    engine = HFEngine()
    engine.load_weights(module.policy, 0)
    greedy = Sampling(temperature=0.0, max_tokens=5)
    completions = dict(engine.generate(prompts, 1, greedy, seed=0))
    assert [completions[n].text for n in range(4)] == ["0", "2", "4", "6"]
    assert {one.token_ids[-1] for one in completions.values()} == {end}


def test_plain_text_ends_with_the_end_of_the_text_whatever_the_template(tmp_path):
    module = SFTModule(qwen_policy(tmp_path))
    assert module.target_ids(PROMPTS[0])[-1] == module.tokenizer.eos_token_id


def test_a_target_does_not_open_the_thought_that_the_template_has_opened(tmp_path):
    module = SFTModule(qwen_policy(tmp_path, ALWAYS_THINKS))
    rows = [{"prompt": "1+1=", "answer": text} for text in ("<think>\na</think>2", "a</think>2")]
    prompts = chat_prompts(module.tokenizer, *rows)
    assert prompts[0].text.endswith("<|im_start|>assistant\n<think>\n")
    first, second = map(module.target_ids, prompts)
    assert first == second
    assert module.tokenizer.decode(first) == f"a</think>2{IM_END}"


class NoFiniteGradient(L.Callback):
    """Spoil the gradients of some batches."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def on_after_backward(self, trainer, module):
        if trainer.fit_loop.total_batch_idx in self.numbers:
            module.policy.trainable_parameters()[0].grad.fill_(float("inf"))


def test_a_step_without_a_finite_gradient_is_skipped(caplog):
    def weights_after(steps, *callbacks):
        module = make_module()
        fit(module, *callbacks, max_steps=steps, gradient_clip_val=1.0)
        return module, [one.detach() for one in module.policy.trainable_parameters()]

    _, plain = weights_after(1)
    module, skipping = weights_after(2, NoFiniteGradient(1))
    assert all(one.equal(other) for one, other in zip(plain, skipping, strict=True))
    assert get_stop_reason(module.trainer) is None
    assert "the gradient of batch 2 is not finite (norm inf)" in caplog.text


def test_too_many_skipped_steps_in_a_row_end_a_warm_up():
    module = make_module()
    fit(module, NoFiniteGradient(0, *range(2, 99)), max_steps=99)
    reason = get_stop_reason(module.trainer)
    assert reason.exit_code == ExitCode.DIVERGED
    assert module.trainer.fit_loop.total_batch_idx + 1 == 2 + 5
    assert all(one.isfinite().all() for one in module.policy.trainable_parameters())


def test_a_tokenizer_without_an_end_is_refused_unless_its_template_has_one(tmp_path):
    for name, tokenizer in [("plain", byte_tokenizer()), ("chat", qwen_tokenizer())]:
        tokenizer.eos_token = None
        tokenizer.save_pretrained(tmp_path / name)
    sampling = Sampling(max_tokens=8)
    module = SFTModule(Policy(architecture=LLAMA, tokenizer=f"{tmp_path}/plain"), sampling=sampling)
    with pytest.raises(UserError, match="the tokenizer must have an end-of-sequence token, got"):
        fit(module, max_steps=1)
    module = SFTModule(Policy(architecture=LLAMA, tokenizer=f"{tmp_path}/chat"))
    (conversation,) = chat_prompts(module.tokenizer, {"prompt": "1+1=", "answer": "2"})
    end = module.tokenizer.convert_tokens_to_ids(IM_END)
    assert module.target_ids(conversation) == [*module.tokenizer("2")["input_ids"], end]
