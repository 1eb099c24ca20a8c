"""Scorers in a suite: batches, threads, errors, warnings; `test_model.py` has what they read."""

import asyncio
import dataclasses
import gc
import logging
import threading
import weakref

import pytest
import torch
from jsonargparse import ArgumentParser
from scorer_models import chat, plain_logits, refusal, save_bert, save_llama, scores, values
from tiny import completion, prompt, tiny_policy
from transformers import AutoModelForSequenceClassification

from lit_grpo.rewards import Reward, ScorerReward
from lit_grpo.rewards.reward_model.reward import _EqualRows, _Row
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Outcome


def test_every_setting_can_be_configured():
    parser = ArgumentParser()
    parser.add_argument("--reward", type=Reward)
    given = {"path": "rm", "label": "good", "batch_size": 4, "weight": 0.5, "on_error": "raise"}
    config = {"class_path": "lit_grpo.rewards.reward_model.reward.ScorerReward", "init_args": given}
    reward = parser.instantiate_classes(parser.parse_object({"reward": config})).reward
    reached = {**vars(reward), **dataclasses.asdict(reward.settings)}
    assert {name: reached[name] for name in given} == given


def test_settings_out_of_range_are_refused(tmp_path):
    path = save_llama(tmp_path)
    assert "must be <= 128" in refusal(path=path, max_tokens=129)
    assert "batch_size must be >= 1" in refusal(path=path, batch_size=0)
    assert "device must be one that this machine has" in refusal(path=path, device="abacus")


def test_error_of_the_model_fails_its_batch_and_later_rows_are_scored(tmp_path):
    # The position embeddings are shortened after loading, so that longer texts raise.
    reward = ScorerReward(save_bert(tmp_path), batch_size=1)
    with RewardSuite([reward]) as suite:
        embeddings = reward._scorer.model.bert.embeddings
        embeddings.position_embeddings = torch.nn.Embedding(20, 32)
        rows = [[completion(text=text) for text in ("a", "b" * 40, "ab")]]
        for _ in range(2):
            (group,) = suite.score([prompt("a")], rows).groups
            outcomes = [score.outcome for score in group.scores["scorer"]]
            assert outcomes == [Outcome.OK, Outcome.ERROR, Outcome.OK]


@pytest.mark.parametrize("error", [StopIteration, SystemExit, torch.OutOfMemoryError])
def test_no_exception_of_the_model_ends_the_scoring(tmp_path, error):
    def fail(*_):
        raise error

    reward = ScorerReward(save_llama(tmp_path), timeout_seconds=60)
    with RewardSuite([reward]) as suite:
        hook = reward._scorer.model.register_forward_pre_hook(fail)
        rows = [[completion(text=text) for text in ("a", "b", "long" * 40)]]
        (group,) = suite.score([prompt()], rows).groups
        outcomes = [score.outcome for score in group.scores["scorer"]]
        assert outcomes == [Outcome.ERROR, Outcome.ERROR, Outcome.TRUNCATED]
        hook.remove()
        assert suite.score([prompt()], rows).valid.tolist() == [[True, True, False]]


def test_weights_that_are_not_finite_give_no_value(tmp_path):
    reward = ScorerReward(save_llama(tmp_path))
    with RewardSuite([reward]) as suite:
        reward._scorer.model.score.weight.fill_(float("nan"))
        (group,) = suite.score([prompt()], [[completion(text="a")]]).groups
    assert group.scores["scorer"][0].outcome is Outcome.ERROR


def check_that_a_policy_can_train():
    policy = tiny_policy()
    policy.model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.trainable_parameters())


def test_completions_that_arrive_one_by_one_share_forward_passes(tmp_path):
    path = save_llama(tmp_path)
    reward = ScorerReward(path, batch_size=8)
    prompts = [prompt("1+1=", id="a"), chat("2+2=", id="b"), prompt("3+3=", id="c")]
    sizes, busy, go = [], threading.Event(), threading.Event()

    def record(model, arguments, inputs):
        sizes.append(len(inputs["input_ids"]))
        busy.set()
        assert go.wait(60)

    with RewardSuite([reward]) as suite:
        reward._scorer.model.register_forward_pre_hook(record, with_kwargs=True)
        scoring = suite.open(prompts, 4)
        for row in (11, 0, 5, 7, 1, 2, 9, 3, 4, 6, 8, 10):
            scoring.add(row, completion(text=str(row)))
            assert busy.wait(60)
        check_that_a_policy_can_train()  # during a forward pass of the scorer
        go.set()
        got = scoring.result().rewards
    assert sizes == [1, 8, 3]
    texts = [f"1+1={row}" for row in range(4)]
    texts += [f"user: 2+2=\nassistant: {row}\n" for row in range(4, 8)]
    texts += [f"3+3={row}" for row in range(8, 12)]
    expected = torch.cat(plain_logits(path, *texts)).double().view(3, 4)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_event_loop_is_free_while_the_model_runs(tmp_path):
    reward = ScorerReward(save_llama(tmp_path))
    busy, go = threading.Event(), threading.Event()

    def block(*_):
        busy.set()
        assert go.wait(60)

    async def run():
        scoring = asyncio.ensure_future(reward.score(prompt(), completion(text="a")))
        while not busy.is_set():  # never ends if the model runs on this loop
            await asyncio.sleep(0.001)
        go.set()
        value = await scoring
        await reward.close()
        return value

    reward.start()
    reward._scorer.model.register_forward_pre_hook(block)
    assert isinstance(asyncio.run(run()), float)


def test_cancelled_row_does_not_affect_the_others(tmp_path):
    path = save_llama(tmp_path)
    reward = ScorerReward(path, batch_size=1)

    async def run():
        rows = [
            asyncio.ensure_future(reward.score(prompt("1+1="), completion(text=text)))
            for text in "abc"
        ]
        await asyncio.sleep(0)
        rows[1].cancel()
        done = await asyncio.gather(*rows, return_exceptions=True)
        await reward.close()
        return done

    reward.start()
    first, cancelled, last = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    expected = [logits.item() for logits in plain_logits(path, "1+1=a", "1+1=c")]
    assert [first, last] == pytest.approx(expected, abs=1e-5)


def test_close_ends_the_pass_in_flight_and_frees_the_model(tmp_path):
    reward = ScorerReward(save_llama(tmp_path), batch_size=1)
    busy, go, finished = threading.Event(), threading.Event(), []

    def block(*_):
        busy.set()
        assert go.wait(60)

    suite = RewardSuite([reward])
    suite.start()
    model = weakref.ref(reward._scorer.model)
    model().register_forward_pre_hook(block)
    model().score.register_forward_hook(lambda *_: finished.append(1))
    thread = reward._thread
    scoring = suite.open([prompt()], 2)
    scoring.add(0, completion(text="a"))
    assert busy.wait(60)
    scoring.add(1, completion(text="b"))
    suite.close()  # while the model is busy
    go.set()
    thread.shutdown()
    gc.collect()
    assert model() is None
    assert scoring.is_cancelled
    assert not finished  # the pass in flight ended before its last layer
    with pytest.raises(RuntimeError, match="not started"):
        asyncio.run(reward.score(prompt(), completion(text="a")))


def test_reward_can_be_started_again_after_close(tmp_path):
    reward = ScorerReward(save_llama(tmp_path))
    assert values(reward, prompt()) == pytest.approx(values(reward, prompt()), abs=1e-6)


def test_global_state_of_torch_is_unchanged(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    path = save_llama(tmp_path)
    torch.set_rng_state(before)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    values(ScorerReward(path, dtype="bfloat16"), prompt())
    assert torch.equal(torch.get_rng_state(), before)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def save_constant(folder):
    path = save_llama(folder)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    model.score.weight.data.zero_()
    model.save_pretrained(path)
    return path


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]


def test_scorer_with_constant_values_is_warned_about_at_16_and_32_rows(tmp_path, caplog):
    prompts = [chat(f"{n}+1=", id=str(n)) for n in range(5)]
    groups = [[f"{n} {row}" for row in range(8)] for n in range(5)]
    with caplog.at_level(logging.WARNING):
        scores(ScorerReward(save_constant(tmp_path)), prompts, *groups)
    first, second = warnings(caplog)  # of 40 rows 35 have an earlier sibling
    assert "gave 16 completions in a row the value of another completion" in first
    assert "gave 32 completions in a row" in second
    assert "nothing is learned" in first
    assert "The end of its last input: …user: " in first


def test_scorer_with_different_values_is_not_warned_about(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        values(ScorerReward(save_llama(tmp_path)), prompt(), [str(n) for n in range(40)])
    assert not warnings(caplog)


def test_count_of_equal_rows_restarts_after_two_different_values():
    equal_rows = _EqualRows()
    # 15 rows are equal to the first one, then one differs, then 16 and 17 are equal.
    given = [1.0] * 16 + [2.0] + [1.0] * 17 + [1.00001]
    rows = [
        _Row(prompt=prompt(), completion=completion(text=str(n)), result=None)
        for n in range(len(given))
    ]
    due = [equal_rows.add(row, value) for row, value in zip(rows, given, strict=True)]
    assert [n for n, is_due in enumerate(due) if is_due] == [33]


def test_equal_completions_of_a_prompt_are_not_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        values(ScorerReward(save_llama(tmp_path)), prompt(), ["same"] * 40)
    assert not warnings(caplog)
