import math
from dataclasses import replace

import pytest
import torch
from chat_models import IM_END, turn_ending_policy
from tiny import LLAMA, prompt, tiny_policy, train_batch

from lit_grpo.policy import LoRA, Policy
from lit_grpo.policy.logprobs import completion_statistics
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.rollout import engine as engine_interface
from lit_grpo.rollout.hf import running_batch
from lit_grpo.rollout.hf.engine import _draw, _possible
from lit_grpo.types import Group, RolloutBatch

PROMPTS = [prompt("12+34=", id="a"), prompt("a longer prompt", id="b"), prompt("x", id="c")]
PLAIN = Sampling(max_tokens=12)


def generate(policy, sampling=PLAIN, *, prompts=PROMPTS, group_size=4, seed=0, max_concurrent=512):
    engine = HFEngine(max_concurrent=max_concurrent)
    engine.load_weights(policy, version=7)
    rows = dict(engine.generate(prompts, group_size, sampling, seed=seed))
    assert sorted(rows) == list(range(len(prompts) * group_size))
    return [rows[n] for n in sorted(rows)]


def test_an_engine_without_weights_says_what_to_call():
    engine, policy = HFEngine(), Policy(architecture=LLAMA)
    for load in (lambda: None, lambda: engine.load_weights(policy, 0)):
        load()
        with pytest.raises(RuntimeError, match=r"call policy.load\(with_reference=False\) and"):
            dict(engine.generate(PROMPTS, 1, PLAIN, seed=0))


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.mark.parametrize(
    "architecture",
    [
        LLAMA,
        LLAMA | {"model_type": "qwen3", "head_dim": 8},
        LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8},
        LLAMA | {"model_type": "granite", "logits_scaling": 3.0},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ],
    ids=lambda architecture: architecture["model_type"],
)
def test_sampler_logprobs_match_teacher_forced_ones(architecture):
    policy = tiny_policy(architecture=architecture)
    sampling = Sampling(max_tokens=12, temperature=0.7, top_p=0.95, top_k=200)
    completions = generate(policy, sampling)
    groups = tuple(
        Group(prompt=p, completions=tuple(completions[4 * i : 4 * i + 4]), scores={})
        for i, p in enumerate(PROMPTS)
    )
    rollouts = RolloutBatch(
        groups=groups,
        rewards=torch.zeros(3, 4),
        parts={},
        valid=torch.ones(3, 4, dtype=torch.bool),
    )
    batch = train_batch(rollouts)
    logprobs, _ = completion_statistics(policy.body_and_head, batch, temperature=0.7)
    assert (logprobs - batch.sampler_logprobs).abs().max() < 1e-4


def test_greedy_completions_are_those_of_transformers_generate(policy):
    ours = generate(policy, replace(PLAIN, temperature=0.0), group_size=1)
    for p, completion in zip(PROMPTS, ours, strict=True):
        theirs = policy.model.generate(
            torch.tensor([p.token_ids]), max_new_tokens=12, do_sample=False
        )
        assert completion.token_ids == tuple(theirs[0, len(p.token_ids) :].tolist())


def test_a_completion_does_not_depend_on_its_batch(policy):
    alone, together = generate(policy, max_concurrent=4), generate(policy, max_concurrent=512)
    assert [c.token_ids for c in alone] == [c.token_ids for c in together]


def test_the_seed_decides_and_rows_of_a_group_differ(policy):
    first, again, other = (generate(policy, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({completion.token_ids for completion in first[:4]}) == 4


def test_every_token_has_the_policy_version_that_sampled_it(policy):
    for completion in generate(policy):
        assert completion.policy_versions == (7,) * len(completion.token_ids)


def test_a_stop_token_ends_a_completion_and_stays_in_it(policy):
    full = generate(policy)
    stop = full[0].token_ids[3]
    for before, after in zip(
        full, generate(policy, replace(PLAIN, stop_token_ids=(stop,))), strict=True
    ):
        if stop in before.token_ids:
            end = before.token_ids.index(stop) + 1
            assert after.token_ids == before.token_ids[:end]
            assert after.sampler_logprobs == pytest.approx(before.sampler_logprobs[:end], abs=1e-5)
            assert after.finish_reason == "stop"
        else:
            assert after.token_ids == before.token_ids


def test_finished_rows_leave_the_running_batch(policy):
    stop = generate(policy)[0].token_ids[0]
    widths = []
    hook = policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    completions = generate(policy, replace(PLAIN, stop_token_ids=(stop,)))
    hook.remove()
    lengths = [len(completion.token_ids) for completion in completions]
    assert widths[0] == len(PROMPTS)  # every prompt is prefilled once
    assert widths[1:] == [sum(n > step for n in lengths) for step in range(1, max(lengths))]
    assert widths[1] < len(completions)


def test_a_stop_string_cuts_the_text_but_not_the_tokens(policy):
    texts = [c.text for c in generate(policy, replace(PLAIN, max_tokens=40), group_size=8)]
    pairs = [text[i : i + 2] for text in texts for i in range(2, len(text) - 2)]
    stop = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
    stopped = 0
    for completion in generate(policy, replace(PLAIN, max_tokens=40, stop=(stop,)), group_size=8):
        decoded = policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert stop not in completion.text
        if completion.finish_reason == "stop" and stop in decoded:
            assert decoded.endswith(stop)
            assert completion.text == decoded[: -len(stop)]
            stopped += 1
    assert stopped


def test_no_completion_is_shorter_than_min_tokens(policy):
    every_token = tuple(range(0, 250))
    stopped = generate(policy, replace(PLAIN, stop_token_ids=every_token, min_tokens=5))
    assert min(len(completion.token_ids) for completion in stopped) >= 5
    assert not any(set(c.token_ids[:4]) & set(every_token) for c in stopped)
    assert {
        len(c.token_ids) for c in generate(policy, replace(PLAIN, stop_token_ids=every_token))
    } == {1}


def test_a_stop_string_before_min_tokens_neither_ends_nor_cuts(policy):
    plain = generate(policy, replace(PLAIN, max_tokens=20))
    stop = next(t for c in plain for t in c.text[:4] if t.isascii() and t.isprintable())
    for completion in generate(policy, replace(PLAIN, max_tokens=20, min_tokens=8, stop=(stop,))):
        head = policy.tokenizer.decode(completion.token_ids[:8], skip_special_tokens=True)
        assert len(completion.token_ids) >= 8
        assert completion.text.startswith(head)
        assert stop not in completion.text[len(head) :]


HYBRID = LLAMA | {
    "model_type": "qwen3_next",
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_experts": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def test_hybrid_models_are_sampled_like_others():
    policy = tiny_policy(architecture=HYBRID)
    greedy = replace(PLAIN, temperature=0.0)
    alone = [generate(policy, greedy, prompts=[one], group_size=1)[0] for one in PROMPTS]
    grouped = generate(policy, greedy, prompts=PROMPTS[:1], group_size=3)
    assert {c.token_ids for c in grouped} == {alone[0].token_ids}


@pytest.mark.parametrize(
    "architecture",
    [LLAMA, LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8}, HYBRID],
    ids=lambda architecture: architecture["model_type"],
)
def test_prompts_that_are_read_some_at_a_time_have_the_same_completions(architecture, monkeypatch):
    policy = tiny_policy(architecture=architecture)
    together = generate(policy)
    rows = []
    policy.model.register_forward_pre_hook(
        lambda _, __, inputs: rows.append(len(inputs["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr(running_batch, "PREFILL_TOKENS", 2 * 15)  # two of the longest prompt
    apart = generate(policy)
    assert rows[:2] == [2, 3 if architecture is HYBRID else 1]
    for one, other in zip(together, apart, strict=True):
        assert one.token_ids == other.token_ids
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)


def test_max_tokens_ends_a_completion_as_truncated(policy):
    (completion,) = generate(policy, Sampling(max_tokens=1), prompts=PROMPTS[:1], group_size=1)
    assert completion.is_truncated
    assert len(completion.token_ids) == 1


def draws(probabilities, **settings):
    noise = (torch.arange(1000) + 0.5) / 1000
    drawn = _draw(torch.tensor(probabilities).expand(1000, -1), Sampling(**settings), noise)
    return drawn.bincount(minlength=len(probabilities)).tolist()


def test_draws_follow_the_distribution():
    assert draws([0.5, 0.0, 0.3, 0.2]) == pytest.approx([500, 0, 300, 200], abs=1)


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    assert draws([0.2, 0.5, 0.3], top_k=2) == pytest.approx([0, 625, 375], abs=1)
    assert draws([0.2, 0.5, 0.3], top_p=0.6) == pytest.approx([0, 625, 375], abs=1)
    assert draws([0.2, 0.5, 0.3], top_p=0.5) == [0, 1000, 0]


def test_the_largest_random_number_never_draws_an_impossible_token():
    largest = torch.tensor([1 - 2**-24])
    probabilities = torch.tensor([[0.3, 0.3, 0.4, 0.0]])
    assert _draw(probabilities, Sampling(), largest).tolist() == [2]


def test_an_impossible_token_that_was_drawn_is_replaced_by_the_most_likely_one():
    probabilities = torch.tensor([[0.3, 0.2, 0.0, 0.5], [0.7, 0.0, 0.2, 0.1]])
    assert _possible(torch.tensor([2, 2]), probabilities).tolist() == [3, 2]
    assert _possible(torch.tensor([0, 1]), probabilities).tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_diverged_weights_raise_an_error_that_says_so(value, temperature):
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.lm_head.weight[7] = value
    with pytest.raises(FloatingPointError, match="newest checkpoint with finite weights"):
        generate(policy, replace(PLAIN, temperature=temperature))


def test_a_token_has_a_finite_logprob_if_a_forbidden_one_is_certain():
    policy = tiny_policy()
    eos = policy.tokenizer.eos_token_id
    policy.model.lm_head.bias = torch.nn.Parameter(torch.zeros(policy.model.config.vocab_size))
    with torch.no_grad():
        policy.model.lm_head.bias[eos] = 200.0
    completions = generate(policy, replace(PLAIN, min_tokens=3))
    assert {len(completion.token_ids) for completion in completions} == {4}
    for completion in completions:
        assert completion.sampler_logprobs[:3] == pytest.approx([-203] * 3, abs=8)
        assert completion.sampler_logprobs[3] == 0


def test_finished_rows_and_a_growing_cache_change_no_other_row():
    """Many short completions finish beside few that exceed the cache's initial capacity twice."""
    policy = tiny_policy(architecture=LLAMA | {"max_position_embeddings": 512})
    sampling = Sampling(max_tokens=200, stop_token_ids=tuple(range(5)))
    together = generate(policy, sampling, group_size=8)
    lengths = [len(completion.token_ids) for completion in together]
    assert min(lengths) < 32
    assert max(lengths) > 128
    alone = generate(policy, sampling, group_size=8, max_concurrent=1)
    assert [c.token_ids for c in alone] == [c.token_ids for c in together]
    for one, other in zip(alone, together, strict=True):
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)


def test_gradient_checkpointing_and_training_mode_do_not_disable_the_cache():
    plain = generate(tiny_policy(lora=LoRA(rank=4)))
    policy = tiny_policy(lora=LoRA(rank=4), gradient_checkpointing=True)
    policy.train()
    assert generate(policy) == plain
    assert policy.model.training


def test_gradients_stay_enabled_for_the_consumer_of_a_generation(policy):
    engine = HFEngine()
    engine.load_weights(policy, 0)
    for _ in engine.generate(PROMPTS, 2, PLAIN, seed=0):
        assert torch.is_grad_enabled()


def test_no_completion_at_a_time_is_refused():
    with pytest.raises(ValueError, match=r"Set model\.engine\.init_args\.max_concurrent"):
        HFEngine(max_concurrent=0)


def test_tokens_of_unfinished_completions_are_counted_while_it_samples(policy):
    engine = HFEngine()
    engine.load_weights(policy, version=7)
    sampling = replace(PLAIN, stop_token_ids=tuple(range(40)))
    rows = engine.generate(PROMPTS, 4, sampling, seed=0)
    counts = [engine.num_unfinished_tokens for _ in rows]
    assert max(counts) > 0
    assert engine.num_unfinished_tokens == 0


def test_a_base_model_ends_at_the_end_of_a_turn_of_its_chat_template(tmp_path):
    policy = turn_ending_policy(tmp_path, PROMPTS[0])
    greedy = Sampling(temperature=0.0, max_tokens=12)
    (completion,) = generate(policy, greedy, prompts=PROMPTS[:1], group_size=1)
    assert (len(completion.token_ids), completion.finish_reason) == (4, "stop")
    assert completion.token_ids[-1] == policy.tokenizer.convert_tokens_to_ids(IM_END)
    assert completion.text == policy.tokenizer.decode(completion.token_ids[:-1])
    longer = replace(greedy, min_tokens=6)
    (forced,) = generate(policy, longer, prompts=PROMPTS[:1], group_size=1)
    assert len(forced.token_ids) >= 6


def test_a_generation_is_left_between_decode_steps(monkeypatch):
    monkeypatch.setattr(engine_interface, "LOOK_SECONDS", 0.0)
    policy, engine, num_looks = tiny_policy(), HFEngine(), []
    policy.train()

    def leave():
        num_looks.append(1)
        if len(num_looks) == 3:
            raise KeyError("left")

    engine.on_wait = leave
    engine.load_weights(policy, 0)
    sampling = replace(PLAIN, min_tokens=12)
    with pytest.raises(KeyError, match="left"):
        list(engine.generate(PROMPTS, 2, sampling, seed=0))
    assert engine.num_unfinished_tokens == 2 * 6
    assert policy.model.training
