import pytest
import torch
from tiny import LLAMA, tiny_policy

from lit_grpo.rollout import WeightCheck
from lit_grpo.rollout.weight_check import (
    MAX_SEQUENCE_TOKENS,
    NUM_POSITIONS,
    NUM_SAMPLES,
    RESERVED_TOKENS,
    WeightMismatch,
    check_logprobs,
    expected_logprobs,
)


@pytest.mark.parametrize("setting", ["every", "num_sequences", "tolerance"])
def test_a_proof_that_checks_nothing_is_refused(setting):
    with pytest.raises(ValueError, match=rf"Set model\.engine\.init_args\.weight_check\.{setting}"):
        WeightCheck(**{setting: 0})


def test_checks_are_close_together_at_first_and_then_at_regular_intervals():
    due = [number for number in range(151) if WeightCheck().is_due(number)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 50, 100, 150]
    assert [number for number in range(9) if WeightCheck(every=3).is_due(number)] == [0, 1, 2, 3, 6]
    assert all(map(WeightCheck(every=1).is_due, range(9)))


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def expect(policy, *, max_length=64, tolerance=None, dtype="float32"):
    weight_check = WeightCheck(num_sequences=2, tolerance=tolerance)
    return expected_logprobs(
        policy, weight_check, temperature=0.7, dtype=dtype, max_length=max_length
    )


def test_expected_logprobs_are_those_of_the_policy_after_each_prefix(policy):
    probes = expect(policy).probes(adapter=None)
    assert len(probes) == 2 * NUM_POSITIONS
    lengths = [len(request.token_ids) for request, _ in probes[:NUM_POSITIONS]]
    assert lengths == [57, 58, 59, 60]
    for request, expected in probes:
        assert len(request.seeds) == NUM_SAMPLES
        assert request.sampling.temperature == 0.7
        logits = policy.model(torch.tensor([request.token_ids])).logits[0, -1]
        torch.testing.assert_close((logits / 0.7).log_softmax(-1), expected)


def test_sequences_fit_the_engine_and_are_the_same_every_time(policy):
    first, again = expect(policy), expect(policy)
    assert torch.equal(first.sequences, again.sequences)
    assert first.sequences.shape == (2, 64 - RESERVED_TOKENS)
    roomy = tiny_policy(architecture=LLAMA | {"max_position_embeddings": 512})
    longest = MAX_SEQUENCE_TOKENS - RESERVED_TOKENS
    assert expect(roomy, max_length=None).sequences.shape == (2, longest)


def test_the_tolerance_follows_the_dtype_unless_it_is_set(policy):
    assert expect(policy).tolerance == 0.005
    assert expect(policy, dtype="bfloat16").tolerance == 0.1
    assert expect(policy, tolerance=0.3).tolerance == 0.3


def test_a_mean_difference_beyond_the_tolerance_is_a_mismatch(policy):
    expected = expect(policy)
    found = check_logprobs([(-1.0, -1.004), (-2.0, -2.0)], expected, "it")
    assert found == pytest.approx(0.002, abs=1e-6)
    with pytest.raises(WeightMismatch, match=r"it does not .* by 0\.5 .* 0\.005 is allowed"):
        check_logprobs([(-1.0, -2.0), (-2.0, -2.0)], expected, "it")
    with pytest.raises(WeightMismatch):
        check_logprobs([(float("nan"), -2.0)], expected, "it")


def test_flash_attention_is_not_used_since_it_has_no_kernel_for_float32(policy, monkeypatch):
    expected = expect(policy)
    config = policy.model.config
    monkeypatch.setattr(config, "_attn_implementation_internal", "flash_attention_2")
    assert torch.equal(expect(policy).logprobs, expected.logprobs)
    assert config._attn_implementation == "flash_attention_2"
