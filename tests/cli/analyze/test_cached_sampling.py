"""Completions that are in the cache are scored again, and only the others are sampled."""

from contextlib import closing

import pytest
from prepared_data import write_prepared
from small_runs import PROMPTS, Recorded, make_module

from lit_grpo.cli.analyze import cached_sampling
from lit_grpo.cli.analyze.cached_sampling import sampled, samples_of
from lit_grpo.cli.analyze.sample_cache import SampleCache
from lit_grpo.data.rows.prepared import find_prepared


@pytest.fixture
def engine():
    return Recorded()


def sample(engine, prompts, directory, *, group_size=4):
    """Return (tokens, reward) of each prompt's completions; the cache has them as they ended."""
    module = make_module(group_size=group_size, engine=engine)
    module.policy.load(with_reference=False)
    engine.load_weights(module.policy, 0)
    cache = SampleCache(directory, "a/model", module.sampling)
    with module.rewards, closing(cache):
        batches = list(sampled(module, prompts, cache))
    groups = [group for batch in batches for group in batch.groups]
    assert [group.prompt for group in groups] == list(prompts)
    rewards = [row for batch in batches for row in batch.rewards.tolist()]
    return [
        [*zip((one.token_ids for one in group.completions), row, strict=True)]
        for group, row in zip(groups, rewards, strict=True)
    ]


def test_what_was_sampled_before_is_scored_again(engine, tmp_path, capsys):
    first = sample(engine, PROMPTS[:2], tmp_path)
    assert len(engine.calls) == 1
    assert "sampled before" not in capsys.readouterr().err
    again = sample(engine, PROMPTS[:3], tmp_path)
    assert "8 of 12 completions were sampled before: " in capsys.readouterr().err
    assert [len(rows) for rows in engine.calls] == [8, 4]
    assert [sorted(rows) for rows in again[:2]] == [sorted(rows) for rows in first]


def test_a_group_that_grows_keeps_its_first_completions(engine, tmp_path, monkeypatch):
    first = sample(engine, PROMPTS[:2], tmp_path)
    monkeypatch.setattr(cached_sampling, "COMPLETIONS_AT_ONCE", 6)
    again = sample(engine, PROMPTS[:2], tmp_path, group_size=6)
    assert [len(rows) for rows in engine.calls] == [8, 2, 2]
    assert [sorted(rows[:4]) for rows in again] == [sorted(rows) for rows in first]
    assert all(len(rows) == 6 for rows in again)


def test_the_cache_is_next_to_the_data(tmp_path):
    write_prepared(tmp_path / "data")
    assert samples_of(find_prepared(str(tmp_path / "data"))) == tmp_path / "data.samples"
