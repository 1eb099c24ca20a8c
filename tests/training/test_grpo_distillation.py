"""On-policy distillation in whole rollout steps, from a teacher that was saved to a directory."""

import itertools

import pytest
import torch
from http_answers import answering
from small_runs import (
    PROMPTS,
    assert_same_runs,
    fit,
    make_module,
    make_trainer,
    start_policy,
    start_weights,
    weights,
)
from teacher_server import vllm_replies
from tiny import LLAMA, perturbed, tiny_policy

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.objective import DistillationTerm, EntropyTerm, KLTerm, Objective
from lit_grpo.policy import LocalTeacher, LoRA, Policy
from lit_grpo.rollout import VLLMTeacher
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.types import UserError

TERMS = {
    "sampled": DistillationTerm(coef=1.0),
    "top 8": DistillationTerm(coef=1.0, top_k=8),
    "all": DistillationTerm(coef=1.0, top_k=1000),
}
for_every_served_term = pytest.mark.parametrize(
    "term", [TERMS["sampled"], TERMS["top 8"]], ids=["sampled", "top 8"]
)
for_every_term = pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory):
    """Return the directory of a teacher that is larger than the policy."""
    path = tmp_path_factory.mktemp("teacher")
    architecture = LLAMA | {"hidden_size": 64, "num_hidden_layers": 3}
    perturbed(tiny_policy(architecture=architecture, seed=1)).save_pretrained(path)
    return path


def distil(path, term, *, teacher=None, surrogate="none", objective=None, **settings):
    objective = objective or Objective(surrogate=surrogate, distillation=term)
    return make_module(teacher=teacher or LocalTeacher(str(path)), objective=objective, **settings)


def full_logprobs(model, batch, row):
    """Return [C, V] of one row, which is alone in its batch."""
    index = batch.prompt_index[row]
    prompt = batch.prompt_ids[index][batch.prompt_mask[index]]
    completion = batch.completion_ids[row][batch.completion_mask[row]]
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1), completion


def loss_by_hand(policy, teacher, batch, term):
    """Return the mean divergence over tokens, with a gradient through the policy."""
    divergences = []
    for n in range(batch.num_rows):
        ours, completion = full_logprobs(policy, batch, n)
        with torch.no_grad():
            theirs, _ = full_logprobs(teacher, batch, n)
        if term.top_k is None:
            mine = ours.gather(1, completion[:, None])[:, 0]
            reward = (mine - theirs.gather(1, completion[:, None])[:, 0]).detach()
            divergences.append(reward * (mine - mine.detach() + 1))
        elif term.top_k >= theirs.shape[1]:
            divergences.append((ours.exp() * (ours - theirs)).sum(1))
        else:
            top = theirs.topk(term.top_k).indices
            p, q = ours.gather(1, top).exp(), theirs.gather(1, top).exp()
            rest, other = 1 - p.sum(1), 1 - q.sum(1)
            divergences.append((p * (p / q).log()).sum(1) + rest * (rest / other).log())
    return torch.cat(divergences).mean()


@for_every_term
@pytest.mark.parametrize("packing", [True, False])
def test_the_update_is_the_gradient_of_the_divergence_from_the_teacher(teacher_path, packing, term):
    module = distil(teacher_path, term, policy={"packing": packing})
    (output,) = fit(module)
    assert module.teacher.body_and_head.uses_packing == packing
    start, before = start_policy(), start_weights()
    loss = loss_by_hand(start.model, module.teacher.model, output["batch"], term)
    loss.backward()
    assert output["metrics"]["policy/distillation_kl"] == pytest.approx(loss.item(), abs=1e-4)
    assert loss > 0.01
    after = weights(module)
    for name, parameter in start.model.named_parameters():
        step = before[name] - after[name]
        torch.testing.assert_close(step, parameter.grad, rtol=2e-3, atol=2e-5)


@pytest.mark.slow
@for_every_served_term
@pytest.mark.parametrize(
    ("lora", "lr", "share"), [(None, 3e-3, 0.8), (LoRA(rank=8), 0.01, 0.95)], ids=["full", "lora"]
)
def test_the_policy_approaches_the_teacher_which_stays(teacher_path, lora, lr, share, term):
    module = distil(
        teacher_path,
        term,
        policy={"lora": lora},
        group_size=16,
        optimizer=lambda params: torch.optim.Adam(params, lr=lr),
    )
    first, *_ = fit(module, max_steps=24, max_epochs=-1)
    teacher = module.teacher.model
    before, after = (
        float(loss_by_hand(model, teacher, first["batch"], TERMS["all"]).detach())
        for model in (start_policy().model, module.policy.model)
    )
    assert after < share * before
    again = LocalTeacher(str(teacher_path))
    again.load(module.policy, temperature=1.0, top_k=None)
    pairs = zip(teacher.parameters(), again.model.parameters(), strict=True)
    assert all(one.equal(other) for one, other in pairs)


@pytest.mark.slow
@for_every_term
def test_a_resumed_run_continues_exactly_and_the_checkpoint_has_no_teacher(
    teacher_path, term, tmp_path
):
    def run(max_steps, ckpt_path=None):
        module = distil(teacher_path, term, update={"minibatches": 2})
        trainer = make_trainer(max_steps=max_steps)
        trainer.fit(module, PromptLoader(PROMPTS, 4), ckpt_path=ckpt_path, weights_only=True)
        return module, trainer

    whole, _ = run(6)
    _, trainer = run(2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed, _ = run(6, tmp_path / "last.ckpt")
    for name, value in weights(whole).items():
        assert value.equal(weights(resumed)[name]), name
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert state.keys() == whole.state_dict().keys()
    assert not any("teacher" in name for name in state)


def test_a_teacher_whose_files_were_replaced_ends_the_resume(tmp_path):
    path, last = tmp_path / "teacher", tmp_path / "last.ckpt"

    def run(max_steps, ckpt_path=None):
        tiny_policy(seed=max_steps).save_pretrained(path)
        module, trainer = distil(path, TERMS["sampled"]), make_trainer(max_steps=max_steps)
        trainer.fit(module, PromptLoader(PROMPTS, 4), ckpt_path=ckpt_path, weights_only=True)
        return trainer

    run(1).save_checkpoint(last)
    with pytest.raises(UserError, match="model.teacher.path must have the weights"):
        run(2, last)


@pytest.mark.slow
@for_every_term
def test_with_grpo_the_gradient_is_the_same_for_any_split_into_micro_batches(teacher_path, term):
    runs = []
    for max_tokens in (1, 60, 100_000):
        objective = Objective(
            distillation=term, kl=KLTerm(coef=0.1), entropy=EntropyTerm(coef=0.01)
        )
        update = {"max_tokens_per_micro_batch": max_tokens}
        module = distil(teacher_path, term, objective=objective, update=update)
        (output,) = fit(module)
        runs.append((weights(module), output["metrics"]))
    assert_same_runs(runs, rtol=1e-3, atol=1e-5, metrics_atol=1e-4)


@for_every_served_term
def test_a_teacher_behind_a_server_trains_as_one_in_the_process(teacher_path, term):
    update = {"max_tokens_per_micro_batch": 60}
    here = distil(teacher_path, term, update=update)
    (expected,) = fit(here)
    with answering(vllm_replies(Policy(str(teacher_path)))) as url:
        there = distil(teacher_path, term, teacher=VLLMTeacher([url]), update=update)
        (output,) = fit(there)
    runs = [(weights(one), out["metrics"]) for one, out in ((there, output), (here, expected))]
    assert_same_runs(runs, rtol=1e-4, atol=1e-6, metrics_atol=1e-4)


@pytest.mark.slow
def test_a_server_that_dies_stops_the_run_which_a_resumed_one_continues_exactly(
    teacher_path, tmp_path
):
    def run(answers, max_steps, ckpt_path=None, **settings):
        with answering(answers) as url:
            teacher = VLLMTeacher([url], **settings)
            module = distil(teacher_path, TERMS["top 8"], teacher=teacher)
            trainer = make_trainer(max_steps=max_steps)
            loader = PromptLoader(PROMPTS, 2)
            trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
        return module, trainer

    replies = vllm_replies(Policy(str(teacher_path)))
    complete, num_asked = replies["POST /v1/completions"], itertools.count()

    def die_in_the_second_step(body):  # after a trial and 8 completions
        return complete(body) if next(num_asked) < 12 else (500, {"error": "CUDA error"})

    whole, _ = run(replies, 3)
    dying = replies | {"POST /v1/completions": die_in_the_second_step}
    stopped, trainer = run(dying, 3, give_up_after_seconds=0.1)
    reason = get_stop_reason(trainer)
    assert reason.exit_code == ExitCode.ENGINE_FAILED
    assert reason.is_step_unfinished
    assert "teacher's server" in reason.message
    assert "CUDA error" in reason.message
    assert stopped.global_step == 1
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed, _ = run(replies, 3, tmp_path / "last.ckpt")
    for name, value in weights(whole).items():
        assert value.equal(weights(resumed)[name]), name


def test_in_python_a_path_is_a_teacher(teacher_path):
    module = distil(teacher_path, TERMS["sampled"], teacher=str(teacher_path))
    (output,) = fit(module)
    assert output["metrics"]["policy/distillation_kl"] > 0


def test_a_teacher_is_not_loaded_to_evaluate(teacher_path):
    module = distil(teacher_path, TERMS["sampled"])
    make_trainer().validate(module, PromptLoader(PROMPTS, 4))
    assert module.teacher.model is None


def test_a_coefficient_needs_a_teacher_and_a_teacher_a_coefficient(teacher_path):
    with pytest.raises(UserError, match=r"needs a teacher, got none .* Set model\.teacher\.path"):
        make_module(objective=Objective(distillation=DistillationTerm(coef=0.5)))
    with pytest.raises(UserError, match=r"coef above 0, got 0\.0 .* leave model\.teacher out"):
        make_module(teacher=LocalTeacher(str(teacher_path)))


def test_a_teacher_with_too_few_positions_is_named(tmp_path):
    architecture = LLAMA | {"max_position_embeddings": 16}
    tiny_policy(architecture=architecture).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the teacher has only 16 positions"):
        fit(distil(tmp_path, TERMS["sampled"]))
