from functools import partial

import lightning as L
import pytest
import torch
from small_runs import (
    PROMPTS,
    Recorded,
    Replayed,
    fit,
    make_module,
    start_policy,
    start_weights,
    weights,
)
from tiny import LLAMA, unbatched_logprobs

from lit_grpo.callbacks import Checkpoints
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.policy import LoRA
from lit_grpo.policy.body_and_head import num_compilations
from lit_grpo.rewards import Reward
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.training import OutagePolicy
from lit_grpo.types import Completion


class Outage(Reward):
    def score(self, prompt, completion):
        raise ConnectionError("the judge is down")


def test_the_update_is_the_policy_gradient_of_the_scored_rollouts():
    """With one update per rollout step the clipped objective has the gradient of REINFORCE."""
    module = make_module()
    (output,) = fit(module)
    batch = output["batch"]
    start, before = start_policy(), start_weights()
    num_tokens = batch.completion_mask.sum()
    loss = -sum(
        batch.advantages[n] * unbatched_logprobs(start.model, batch, n)[0].sum()
        for n in range(batch.num_rows)
    )
    (loss / num_tokens).backward()
    assert batch.advantages.abs().max() > 0.5
    after = weights(module)
    for name, parameter in start.model.named_parameters():
        step = before[name] - after[name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=2e-6)


def test_a_metric_without_a_value_in_a_step_is_logged_as_nan():
    class DownLater(Reward):
        num_calls = 0

        def score_group(self, prompt, completions):
            self.num_calls += 1
            if self.num_calls > len(PROMPTS):
                raise ConnectionError("down")
            return [float(len(c.token_ids)) for c in completions]

    logged = []

    class RecordLogged(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            logged.append(dict(trainer.logged_metrics))

    module = make_module(rewards=[DownLater()], outage=OutagePolicy(max_absent_fraction=1))
    fit(module, callbacks=[RecordLogged()], max_steps=-1, max_epochs=2)
    assert logged[0]["reward/mean"] > 0
    assert logged[1]["reward/mean"].isnan()
    assert logged[1]["policy/loss"].isnan()
    assert logged[1]["reward/valid_fraction"] == 0


def test_the_kl_term_measures_the_divergence_from_the_initial_policy():
    module = make_module(objective=Objective(kl=KLTerm(coef=0.5)), policy={"lora": LoRA(rank=4)})
    first, second = fit(module, max_steps=2)
    assert first["metrics"]["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert second["metrics"]["policy/kl"] > 1e-7
    batch = second["batch"]
    with torch.no_grad(), module.policy.model.disable_adapter():
        expected = torch.cat(
            [unbatched_logprobs(module.policy.model, batch, n)[0] for n in range(16)]
        )
    got = batch.ref_logprobs[batch.completion_mask]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_two_runs_of_one_seed_are_bit_identical_and_another_seed_differs():
    runs = []
    for seed in (0, 0, 1):
        module = make_module(seed=seed)
        fit(module, max_steps=2)
        runs.append(weights(module)["lm_head.weight"])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_no_optimizer_step_is_taken_where_no_row_is_valid(caplog):
    module = make_module(rewards=[Outage()], outage=OutagePolicy(max_absent_fraction=1))
    outputs = fit(module, max_steps=-1, max_epochs=2)
    assert [output["batch"] for output in outputs] == [None, None]
    assert module.global_step == 0
    assert outputs[0]["metrics"]["reward/valid_fraction"] == 0.0
    assert outputs[0]["metrics"]["reward/outage/error_fraction"] == 1.0
    assert "reward/mean" not in outputs[0]["metrics"]
    assert "no token to train on" in caplog.text
    torch.testing.assert_close(weights(module), start_weights(), rtol=0, atol=0)


class ComparesWeights(HFEngine):
    """Runs the policy when it gets its weights, as servers are checked, and not to sample."""

    samples_with_policy = False

    def load_weights(self, policy, version):
        super().load_weights(policy, version)
        policy.model(input_ids=torch.tensor([[1, 2]]))

    def generate(self, prompts, group_size, sampling, *, seed):
        for row in range(len(prompts) * group_size):
            logprobs = (-float(2 + row % 2),) * 2
            yield (
                row,
                Completion(
                    token_ids=(3, 4), sampler_logprobs=logprobs, text="", finish_reason="stop"
                ),
            )


def test_an_engine_may_run_a_divided_policy_when_it_gets_its_weights(monkeypatch):
    monkeypatch.setattr("lit_grpo.training.base.is_divided", lambda model: True)
    (output,) = fit(make_module(engine=ComparesWeights()))
    assert output["rollouts"].valid.all()


class OverlappingEngine(HFEngine):
    overlaps_updates = True


IMPOSSIBLE = {
    "a group of one": ({"group_size": 1}, "got 1 .*Set model.group_size"),
    "a negative number of rounds": (
        {"dynamic_sampling_rounds": -1},
        "got -1 .*Set model.dynamic_sampling_rounds",
    ),
    "greedy sampling": (
        {"sampling": Sampling(temperature=0.0)},
        r"got 0\.0 .*Set model.sampling.temperature",
    ),
    "sampling ahead with the weights that are trained": (
        {"engine": HFEngine(), "max_head_offpolicyness": 1},
        "must be 0 with HFEngine, got 1",
    ),
    "sampling ahead less than one rollout step": (
        {"update": {"epochs": 2}, "max_head_offpolicyness": 1},
        "epochs .* = 2, got 1",
    ),
    "sampling ahead a negative number of steps": ({"max_head_offpolicyness": -1}, "got -1"),
    "sampling ahead prompts that replace groups": (
        {"dynamic_sampling_rounds": 1, "max_head_offpolicyness": 1},
        "got 1 and 1",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_settings_are_refused_when_the_config_is_read(case):
    settings, message = IMPOSSIBLE[case]
    with pytest.raises(ValueError, match=message):
        make_module(**({"engine": OverlappingEngine()} | settings))


def test_in_mixed_precision_the_update_is_that_of_float32_but_for_rounding():
    mixed = make_module(engine=(recorded := Recorded()))
    fit(mixed, precision="bf16-mixed")
    plain = make_module(engine=Replayed(recorded))
    fit(plain)
    assert all(one.dtype == torch.float32 for one in weights(mixed).values())
    start, found, expected = (
        torch.cat([one.flatten() for one in named.values()])
        for named in (start_weights(), weights(mixed), weights(plain))
    )
    difference = (found - expected).norm() / (expected - start).norm()
    assert 1e-4 < difference < 0.1  # bfloat16 has 8 bits


@pytest.mark.slow
def test_a_compiled_forward_takes_the_same_steps_and_is_compiled_once(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # starts no processes
    small = {"architecture": LLAMA | {"num_hidden_layers": 1}}
    # With other seeds sizes of the first step may be equal by chance, and are compiled as equal.
    plain, compiled = (make_module(policy=small | {"compile": on}, seed=3) for on in (False, True))
    before = num_compilations()
    expected, outputs = (fit(module, max_steps=6) for module in (plain, compiled))
    for name, value in expected[0]["metrics"].items():
        assert outputs[0]["metrics"][name] == pytest.approx(value, abs=1e-4), name
    num_tokens = {output["batch"].completion_mask.sum().item() for output in outputs}
    assert len(num_tokens) > 3  # the steps have different shapes
    counts = [output["metrics"]["perf/num_compilations"] for output in outputs]
    assert before < counts[0] == counts[-1]
    assert "perf/num_compilations" not in expected[0]["metrics"]


@pytest.mark.slow
def test_a_compiled_policy_with_an_adapter_trains_as_any_and_resumes_bit_identically(
    monkeypatch, tmp_path
):
    # That code is generated rightly is tested above.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    policy = {"architecture": LLAMA | {"num_hidden_layers": 1}, "lora": LoRA(rank=4)}

    def train(*, compiles: bool, ckpt_path=None, **trainer):
        module = make_module(
            policy=policy | {"compile": compiles},
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            seed=3,
        )
        saving = Checkpoints(dirpath=str(tmp_path), every_n_steps=2, keep_last=9)
        fit(module, callbacks=[saving], max_steps=4, ckpt_path=ckpt_path, **trainer)
        return weights(module)

    expected, whole = train(compiles=False), train(compiles=True)
    torch.compiler.reset()
    resumed = train(compiles=True, ckpt_path=tmp_path / "step_000002.ckpt")
    for name, weight in whole.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
        assert resumed[name].equal(weight), name
