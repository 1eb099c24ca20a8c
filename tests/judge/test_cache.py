import json
import logging
import pickle
import zlib
from pathlib import Path

import diskcache
import pytest
from forked import run_in_processes

from lit_grpo.judge.cache import VerdictCache, cache_key

VERDICT = {"explanation": "fair", "score": 7}


@pytest.fixture
def cache(tmp_path):
    one = VerdictCache(tmp_path / "cache")
    yield one
    one.close()


def test_a_verdict_is_found_again_by_a_later_run(tmp_path):
    for number in range(2):
        cache = VerdictCache(tmp_path / "cache")
        assert cache.get("k") == (VERDICT if number else None)
        cache.put("k", VERDICT)
        cache.close()


def test_a_key_depends_on_every_part_but_not_on_their_order():
    base = {"deployment": ("a", "b"), "content": {"x": 1, "y": [1, 2]}, "vote": 0}
    assert cache_key(**base) == cache_key(**dict(reversed(base.items())))
    others = [{"vote": 1}, {"deployment": ("ab",)}, {"content": {"x": 1, "y": [2, 1]}}]
    keys = {cache_key(**(base | other)) for other in others} | {cache_key(**base)}
    assert len(keys) == 4


def test_an_entry_that_cannot_be_read_is_ignored(cache):
    cache.put("k", VERDICT)
    with cache._entries.transact():
        cache._entries._sql("UPDATE Cache SET value = ?", (b"not zlib",))
    assert cache.get("k") is None
    cache.put("k", VERDICT)
    assert cache.get("k") == VERDICT


@pytest.mark.parametrize("entry", ["text", 3, [1], {"other": 1}, None])
def test_an_entry_of_another_kind_is_ignored(cache, entry):
    cache._entries.set("k", entry)
    assert cache.get("k") is None


def test_a_path_that_is_not_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("taken")
    with pytest.raises(ValueError, match="writable directory.*Set judge.cache"):
        VerdictCache(tmp_path / "file")


def test_a_file_that_is_not_a_database_is_refused(tmp_path):
    (tmp_path / "cache.db").write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="must be a writable directory"):
        VerdictCache(tmp_path)


def test_failed_writes_are_logged_once(cache, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache.put("k", {"explanation": {1, 2}})
    assert caplog.text.count("cannot write verdicts to") == 1
    assert cache.get("k") is None


def test_processes_may_write_at_the_same_time(tmp_path):
    def write(name):
        cache = VerdictCache(tmp_path)
        for number in range(100):
            cache.put(f"{name}{number}", {"score": number})
            cache.put("both", {"score": 1})
            assert cache.get("both") == {"score": 1}
        cache.close()

    run_in_processes(lambda: write("a"), lambda: write("b"))
    cache = VerdictCache(tmp_path)
    found = {name: [cache.get(f"{name}{number}") for number in range(100)] for name in "ab"}
    cache.close()
    assert found == {name: [{"score": number} for number in range(100)] for name in "ab"}


def test_the_cache_holds_json(cache):
    cache.put("k", VERDICT)
    ((value,),) = cache._entries._sql("SELECT value FROM Cache").fetchall()
    assert json.loads(zlib.decompress(value)) == {"verdict": VERDICT}


class CreatesDirectory:
    def __init__(self, directory):
        self.directory = directory

    def __reduce__(self):
        return Path.mkdir, (self.directory,)


def test_a_pickle_in_a_shared_cache_is_not_loaded(cache, tmp_path):
    cache.put("k", VERDICT)
    pickled = pickle.dumps(CreatesDirectory(tmp_path / "created"))
    mode = diskcache.core.MODE_PICKLE
    cache._entries._sql("UPDATE Cache SET mode = ?, value = ?", (mode, pickled))
    assert cache.get("k") is None
    assert not (tmp_path / "created").exists()
