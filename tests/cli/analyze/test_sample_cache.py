"""Samples of a policy are found again by the policy, the sampling parameters and the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import completion, prompt

from lit_grpo.cli.analyze.sample_cache import SampleCache
from lit_grpo.rollout import Sampling
from lit_grpo.types import Completion

SAMPLING = Sampling(max_tokens=3)
PROMPT = prompt("1+1=", id="one")


def cache(here, policy="a/model", sampling=SAMPLING) -> SampleCache:
    return SampleCache(here / "samples", policy, sampling)


@pytest.fixture
def written(here):
    """Two samples, of which the second was cut off."""
    samples = [completion([5, 6]), replace(completion([7, 8, 9]), finish_reason="length")]
    found = cache(here)
    for one in samples:
        found.add(PROMPT, one)
    found.close()
    return samples


def test_samples_are_there_for_the_next_process_without_their_logprobs(written, here):
    found = cache(here)
    assert found.count(PROMPT) == 2
    assert [*found.completions(PROMPT)] == [replace(one, sampler_logprobs=()) for one in written]
    assert [*found.completions(prompt("1+2=", id="one"))] == []


@pytest.mark.usefixtures("written")
def test_samples_of_this_process_do_not_count(here):
    found = cache(here)
    found.add(PROMPT, completion([1]))
    assert found.count(PROMPT) == 2
    found.close()
    assert cache(here).count(PROMPT) == 3


def test_what_the_engine_could_not_sample_is_not_kept(here):
    found = cache(here)
    found.add(PROMPT, Completion.failed("the server is gone"))
    found.close()
    assert cache(here).count(PROMPT) == 0


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    "settings",
    [{"policy": "another/model"}, {"sampling": replace(SAMPLING, temperature=0.5)}],
)
def test_another_policy_or_sampling_has_samples_of_its_own(settings, here):
    assert cache(here, **settings).count(PROMPT) == 0


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    "other", [prompt("1+1=", id="two"), prompt("1+1 =", id="one")], ids=["id", "text"]
)
def test_another_prompt_has_samples_of_its_own(other, here):
    assert cache(here).count(other) == 0


def test_a_policy_that_was_trained_again_in_its_directory_is_another_one(here):
    (here / "model").mkdir()
    (here / "model/weights").write_bytes(b"abc")
    policy = str(here / "model")
    before = cache(here, policy).directory
    assert cache(here, policy).directory == before
    (here / "model/weights").write_bytes(b"abcd")
    assert cache(here, policy).directory != before
