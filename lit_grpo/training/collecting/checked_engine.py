"""Call an engine, and check that it keeps the contract of ``RolloutEngine.generate``.

A faulty engine would otherwise fail far from the cause, or silently.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf, isfinite
from typing import Any, get_args

from lit_grpo.diagnostics.memory import is_out_of_memory
from lit_grpo.rollout import EngineFailed, RolloutEngine, SampledPolicy, Sampling
from lit_grpo.training.waiting import StepAbandoned
from lit_grpo.types import Completion, Prompt, UserError
from lit_grpo.types.errors import Diverged, EngineBug, OutOfMemory, as_rank_lost, is_disk_full
from lit_grpo.types.functions import defined_at, users_traceback
from lit_grpo.types.rollouts import FinishReason

log = logging.getLogger(__name__)

PASSED_ON = (EngineFailed, StepAbandoned, UserError, Diverged, OutOfMemory)
"""Errors that an engine may raise; each ends the run in a way of its own."""
PER_TOKEN = ("token_ids", "sampler_logprobs", "policy_versions")
"""Fields of a completion with an entry for each token."""
SHOWN_ROWS = 8
ROUNDING = 1e-3
"""How far above 0 a logprob may be: in low precision, a certain token's is rounded."""


def start_engine(engine: RolloutEngine, policy: SampledPolicy) -> None:
    """Start an engine, which is told the size of the policy's vocabulary.

    Raises:
        EngineBug: it is the user's and raised an exception.
    """
    engine.policy_vocab_size = policy.model.config.get_text_config().vocab_size
    with _bugs_of_users(engine, "start"):
        engine.start(policy)


def load_weights(engine: RolloutEngine, policy: SampledPolicy, version: int) -> None:
    """Load the weights of a version of the policy; every rank must call this.

    Raises:
        EngineFailed: the engine gave up.
        EngineBug: it is the user's and raised an exception.
    """
    with _bugs_of_users(engine, "load_weights"):
        engine.load_weights(policy, version)


def close_engine(engine: RolloutEngine) -> None:
    """Close an engine. Log errors of a user's engine: the run has its result by then."""
    try:
        with _bugs_of_users(engine, "close"):
            engine.close()
    except EngineBug as error:
        log.error("%s", error)


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    *,
    seed: int,
) -> Iterator[tuple[int, Completion]]:
    """Yield (row, completion) from the engine, each row once.

    Raises:
        EngineBug: the engine does not keep its contract, or is the user's and raised an exception.
    """
    num_rows = len(prompts) * group_size
    name = _describe(engine, "generate")
    once = (
        f"{name} must yield each of the len(prompts) * group_size = {num_rows} rows exactly once, "
        "in any order"
    )
    missing = dict.fromkeys(range(num_rows))
    for item in _items(engine, name, prompts, group_size, sampling, seed):
        row, completion = _pair(name, item)
        if row not in missing:
            fault = "twice" if 0 <= row < num_rows else f"(the last one is {num_rows - 1})"
            raise EngineBug(
                f"{once}, got row {row} {fault}. Row n is completion n % group_size of "
                "prompt n // group_size."
            )
        del missing[row]
        completion = _with_plain_numbers(name, row, completion)
        _check_completion(name, row, completion)
        _check_tokens(name, row, completion.token_ids, engine.policy_vocab_size)
        if (length := len(completion.token_ids)) > sampling.max_tokens:
            raise EngineBug(
                f"{name} must yield completions of at most max_tokens = {sampling.max_tokens} "
                f"tokens, got {length} in row {row}. End such a completion there, with the finish "
                "reason 'length'."
            )
        yield row, completion
    if missing:
        few = ", ".join(map(str, [*missing][:SHOWN_ROWS])) + ", …" * (len(missing) > SHOWN_ROWS)
        raise EngineBug(
            f"{once}, got {num_rows - len(missing)} of them (missing: {few}). Yield "
            "Completion.failed(why) for a row that cannot be sampled, or raise EngineFailed if "
            "none can be."
        )


@contextmanager
def _bugs_of_users(engine: RolloutEngine, method: str) -> Iterator[None]:
    """Turn a failure of a user's engine into a bug that names its place in the code.

    Raises:
        EngineBug: it has raised an exception within the context.
    """
    try:
        yield
    except PASSED_ON:
        raise
    except Exception as error:
        if not _is_users(engine) or _is_of_machine(error):
            raise
        name = _describe(engine, method)
        raise EngineBug(f"{name} failed:\n{users_traceback(error)}") from error


def _items(
    engine: RolloutEngine,
    name: str,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seed: int,
) -> Iterator[Any]:
    """Yield what the engine yields.

    Raises:
        EngineBug: it is the user's and raised an exception, or it returned something else.
    """
    with _bugs_of_users(engine, "generate"):
        found = engine.generate(tuple(prompts), group_size, sampling, seed=seed)
        if isinstance(found, Iterable):
            yield from found
            return
    raise EngineBug(
        f"{name} must return an iterator over (row, completion), got {found!r}. Write yield row, "
        "completion for each row."
    )


def _is_users(engine: RolloutEngine) -> bool:
    return type(engine).__module__.partition(".")[0] != "lit_grpo"


def _is_of_machine(error: Exception) -> bool:
    """Return whether memory, the disk or another process is the reason for an error."""
    return is_out_of_memory(error) or is_disk_full(error) or as_rank_lost(error) is not None


def _pair(name: str, item: Any) -> tuple[int, Completion]:
    """Return the row and the completion that an engine has yielded.

    Raises:
        EngineBug: it has yielded something else.
    """
    match item:
        case (row, Completion() as completion) if hasattr(row, "__index__"):
            return row.__index__(), completion
    raise EngineBug(
        f"{name} must yield pairs of a row number and a Completion, got {str(item)[:100]}. Write "
        "yield row, completion."
    )


def _with_plain_numbers(name: str, row: int, completion: Completion) -> Completion:
    """Return a completion with tuples of Python's numbers instead of lists, tensors or arrays.

    Raises:
        EngineBug: something else is in their place.
    """
    found: dict[str, Any] = {}
    for field in PER_TOKEN:
        values = getattr(completion, field)
        if type(values) is tuple and {*map(type, values)} <= {int, float}:
            continue
        try:
            plain = values.tolist() if hasattr(values, "tolist") else values
            if not isinstance(plain, Sequence):
                raise TypeError
            found[field] = tuple(one.item() if hasattr(one, "item") else one for one in plain)
        except (TypeError, ValueError, RuntimeError) as error:  # no sequence, or of tensors
            raise EngineBug(
                f"{name} must yield {field} as a tuple with one entry per token, got "
                f"{str(values)[:100]} in row {row}. Set {field} of the Completion."
            ) from error
    return replace(completion, **found) if found else completion


def _check_completion(name: str, row: int, completion: Completion) -> None:
    if completion.finish_reason not in get_args(FinishReason):
        raise EngineBug(
            f"{name} must yield a finish_reason of {', '.join(get_args(FinishReason))}, got "
            f"{completion.finish_reason!r} in row {row}. Set finish_reason of the Completion."
        )
    num_tokens = len(completion.token_ids)
    lengths = {"sampler_logprobs": len(completion.sampler_logprobs)}
    if completion.policy_versions:  # else they are unknown
        lengths["policy_versions"] = len(completion.policy_versions)
    for field, length in lengths.items():
        if length != num_tokens:
            raise EngineBug(
                f"{name} must yield {field} with one entry per token, got {length} for the "
                f"{num_tokens} tokens of row {row}. Set {field} of the Completion."
            )
    if not _are_logprobs(completion.sampler_logprobs):
        wrong = next(one for one in completion.sampler_logprobs if not _are_logprobs([one]))
        raise EngineBug(
            f"{name} must yield sampler_logprobs that are finite and <= 0, got {wrong} in row "
            f"{row}. Set sampler_logprobs of the Completion to the natural logarithms of the "
            "probabilities with which its tokens were sampled."
        )


def _check_tokens(name: str, row: int, ids: Sequence[int], vocab_size: int | None) -> None:
    """Check that a completion consists of tokens that the policy has, if it is known how many."""
    if _are_tokens(ids, vocab_size):
        return
    wrong = next(one for one in ids if not _are_tokens([one], vocab_size))
    last = "" if vocab_size is None else f" to {vocab_size - 1}"
    raise EngineBug(
        f"{name} must yield token_ids that are whole numbers from 0{last}, the tokens of the "
        f"policy, got {wrong!r} in row {row}. Set token_ids of the Completion to those that the "
        "policy's tokenizer gives; another one has other ids."
    )


def _are_tokens(ids: Sequence[int], vocab_size: int | None) -> bool:
    """Return whether all are whole numbers within the vocabulary."""
    try:
        # The sum is a whole number if all are.
        are_whole = hasattr(sum(ids), "__index__")
        return are_whole and min(ids, default=0) >= 0 and max(ids, default=0) < (vocab_size or inf)
    except TypeError:  # one is not a number
        return False


def _are_logprobs(values: Sequence[float]) -> bool:
    """Return whether all are finite numbers and none is above 0, but for rounding."""
    try:
        # The sum finds a NaN or an infinite value three times as fast as a look at each.
        return isfinite(sum(values)) and max(values, default=0) <= ROUNDING
    except TypeError:  # a value is not a number
        return False


def _describe(engine: RolloutEngine, method: str) -> str:
    """Return the name of a method of the engine's, with its file and line."""
    kind = type(engine)
    _, code = defined_at(getattr(engine, method))
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{kind.__module__}.{kind.__qualname__}.{method}{place}"
