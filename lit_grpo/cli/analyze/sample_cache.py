"""Completions of a policy on disk, so that none is sampled again after a kill."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_grpo.cli.prepare.records import RecordFiles
from lit_grpo.rollout import Sampling
from lit_grpo.types import Completion, Prompt

FORMAT = 1
PREFIX = "policy-"


class SampleCache:
    """Completions sampled by one policy with one set of sampling parameters.

    Several processes may write. Logprobs are not kept: no reward reads them.

    Args:
        directory: Directory that all policies share.
        policy: Directory or Hub id of the policy. A directory is known by the sizes and times of
            its files, so a policy that was trained again counts as a different one.
        sampling: The sampling parameters.
    """

    def __init__(self, directory: Path, policy: str, sampling: Sampling) -> None:
        about = [FORMAT, _files(policy) or policy, asdict(sampling)]
        self.directory = directory / f"{PREFIX}{_digest(about)[:16]}"
        self._files = RecordFiles(self.directory)
        self._found: dict[str, list[tuple[array[int], str, str]]] = {}
        for one in self._files.read_new():
            sample = (array("i", one["ids"]), one["text"], one["finish"])
            self._found.setdefault(one["k"], []).append(sample)

    def count(self, prompt: Prompt) -> int:
        """Return how many completions of a prompt were there at the start."""
        return len(self._found.get(_key(prompt), ()))

    def completions(self, prompt: Prompt) -> Iterator[Completion]:
        """Yield the completions of a prompt that were there at the start."""
        for token_ids, text, finish_reason in self._found.get(_key(prompt), ()):
            yield Completion(
                token_ids=tuple(token_ids),
                sampler_logprobs=(),
                text=text,
                finish_reason=finish_reason,  # type: ignore[arg-type]
            )

    def add(self, prompt: Prompt, one: Completion) -> None:
        """Record a completion, unless the engine could not sample it."""
        if not one.is_failed:
            record = {"ids": one.token_ids, "text": one.text, "finish": one.finish_reason}
            self._files.append({"k": _key(prompt), **record})

    def close(self) -> None:
        self._files.close()


def _files(policy: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files of a directory; none if it is not one."""
    with suppress(OSError):
        found = ((path.name, path.stat()) for path in Path(policy).expanduser().iterdir())
        return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
    return []


def _key(prompt: Prompt) -> str:
    return _digest([prompt.id, prompt.token_ids])[:32]


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
