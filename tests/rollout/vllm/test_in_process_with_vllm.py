"""In-process vLLM, a real one: the program `_vllm_checks` uses it, and the tests here judge."""

import pytest
from vllm_environment import MAX_MODEL_LEN, needs_vllm
from vllm_runs import assert_same_logprobs, in_process_checks

from lit_grpo.policy.byte_tokenizer import byte_tokenizer

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    return in_process_checks(tmp_path_factory)


def tokens(completions):
    return [completion["token_ids"] for completion in completions]


def test_greedy_completions_are_those_of_transformers_generate(checks):
    sampling = checks["sampling"]
    assert tokens(sampling["greedy"]) == sampling["greedy_by_transformers"]
    assert_same_logprobs(sampling["greedy"], sampling["greedy_trainer_logprobs"])


def test_logprobs_at_a_temperature_are_those_of_the_trainer(checks):
    sampled = checks["sampling"]["temperature_0.7"]
    assert_same_logprobs(sampled["completions"], sampled["trainer_logprobs"])


def test_raw_logprobs_with_top_p_and_top_k_are_those_of_the_trainer(checks):
    sampled = checks["raw"]["top_p"]
    assert_same_logprobs(sampled["completions"], sampled["trainer_logprobs"])


def test_sampling_for_which_vllm_reports_other_logprobs_is_refused(checks):
    top_p, temperature = checks["sampling"]["top_p"], checks["raw"]["other_temperature"]
    assert "Set model.sampling.top_p to 1" in top_p["message"]
    assert "Set model.engine.init_args.logprobs_mode" in temperature["message"]


def test_the_seed_decides_and_rows_of_a_group_differ(checks):
    first, again, other = checks["sampling"]["seeds"]
    assert first == again
    assert tokens(first) != tokens(other)
    assert len(set(map(tuple, tokens(first)))) == len(first)


def test_every_token_has_the_policy_version_that_sampled_it(checks):
    for completion in checks["sampling"]["full"]:
        assert completion["policy_versions"] == [3] * len(completion["token_ids"])
    for completion in checks["full"]["new_version"]["completions"]:
        assert completion["policy_versions"] == [7] * len(completion["token_ids"])


def test_a_stop_token_ends_a_completion_and_stays_in_it(checks):
    sampling = checks["sampling"]
    stop, ended = sampling["stop_token"], 0
    for before, after in zip(sampling["full"], sampling["stopped_by_token"], strict=True):
        if stop in before["token_ids"]:
            end = before["token_ids"].index(stop) + 1
            assert after["token_ids"] == before["token_ids"][:end]
            assert after["finish_reason"] == "stop"
            ended += 1
        else:
            assert after["token_ids"] == before["token_ids"]
    assert ended


def test_a_stop_string_cuts_the_text_but_not_the_tokens(checks):
    sampling, tokenizer = checks["sampling"], byte_tokenizer()
    stop, ended = sampling["stop_string"], 0
    for completion in sampling["stopped_by_string"]:
        decoded = tokenizer.decode(completion["token_ids"], skip_special_tokens=True)
        assert stop not in completion["text"]
        if stop in decoded:
            assert decoded.endswith(stop)
            assert completion["text"] == decoded[: -len(stop)]
            assert completion["finish_reason"] == "stop"
            ended += 1
    assert ended


def test_no_completion_is_shorter_than_min_tokens(checks):
    for completion in checks["sampling"]["min_tokens"]:
        assert len(completion["token_ids"]) >= 5
        assert min(completion["token_ids"][:4]) >= 250  # lower ones would have ended it


def test_a_prompt_that_vllm_refuses_is_a_failed_row_among_sampled_ones(checks):
    rows = checks["sampling"]["with_one_too_long"]
    assert [row["finish_reason"] for row in rows] == ["failed"] * 3 + ["length"] * 3
    assert str(MAX_MODEL_LEN) in rows[0]["failure"]


def test_completions_are_yielded_while_others_run_and_closing_aborts_those(checks):
    aborted = checks["aborted"]
    assert aborted["first"] == {"row": 0, "num_tokens": 1}
    assert aborted["was_running"]
    assert not aborted["is_running"]
    assert aborted["next_is_the_same"]


def test_tokens_of_unfinished_completions_are_counted_while_it_samples(checks):
    while_sampling, closed = checks["aborted"]["num_unfinished_tokens"]
    assert while_sampling > 0
    assert closed == 0


def test_new_weights_are_sampled_with_and_checked(checks):
    full = checks["full"]
    assert_same_logprobs(
        full["new_version"]["completions"], full["new_version"]["trainer_logprobs"]
    )
    assert len(full["differences"]) == 2
    assert max(full["differences"]) < 1e-4
    assert full["health"]


def test_weights_of_a_version_are_sent_once(checks):
    assert checks["full"]["same_version"]


@pytest.mark.parametrize("way", ["adapter", "merged"])
def test_an_adapter_is_sampled_with_and_checked_whether_merged_or_not(checks, way):
    sampled = checks[way]["sampled"]
    assert_same_logprobs(sampled["completions"], sampled["trainer_logprobs"])
    assert len(checks[way]["differences"]) == 3
    assert max(checks[way]["differences"]) < 1e-4


def test_only_the_latest_adapter_stays_loaded_and_on_disk(checks):
    assert checks["adapter"]["loaded"] == [[1], [2], [3]]
    assert checks["adapter"]["directories"] == ["adapter-2"]
    assert checks["adapter"]["is_scratch_gone"]


def test_a_tied_head_that_stays_stale_is_detected_at_the_first_change(checks):
    tied = checks["tied"]
    assert max(tied["differences_before"]) < 1e-4  # at the first update old and new are the same
    assert tied["failure"]["type"] == "EngineFailed"
    assert "differ from the trainer's by 0." in tied["failure"]["message"]
    assert "where 0.005 is allowed" in tied["failure"]["message"]


def test_a_prefix_cache_that_outlives_an_update_is_detected(checks):
    skipped = checks["skipped_reset"]
    assert skipped["failure"]["type"] == "EngineFailed"
    assert "where 0.005 is allowed" in skipped["failure"]["message"]
    assert not skipped["health"]


def test_random_numbers_of_a_training_are_those_without_an_engine(checks):
    process = checks["process"]
    assert process["disturbed"] == process["undisturbed"]


def test_the_process_keeps_its_environment_hooks_threads_and_groups(checks):
    process = checks["process"]
    assert not process["before"]["has_process_group"]
    assert process["after"] == [process["before"]] * 3
    assert checks["shared_state_at_the_end"] == process["before"]


def test_memory_is_freed_between_generations_and_weights_are_sent_again(checks):
    """On a CPU vLLM's sleep and wake-up work, but free no memory."""
    for way in ("full", "adapter", "merged"):
        asleep = checks[way]["asleep"]
        assert asleep["was_asleep"] == [True] * 4, way
        assert asleep["is_repeated"], way
        assert asleep["weights_sent"] == (2 if way == "adapter" else 4), way
        assert max(asleep["differences"]) < 1e-4, way


def test_no_process_is_left_behind(checks):
    assert checks["children"] == []


def test_a_process_group_is_refused_with_the_engine_to_use_instead(checks):
    assert checks["process_group"]["type"] == "UserError"
    assert "Set trainer.devices to 1" in checks["process_group"]["message"]
    assert "VLLMServerEngine" in checks["process_group"]["message"]
