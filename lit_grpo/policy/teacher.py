"""The teacher of on-policy distillation: a frozen model that reads the policy's completions."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_grpo.policy.body_and_head import (
    BodyAndHead,
    check_body_and_head,
    packs_match_padded,
    runs_packs,
)
from lit_grpo.policy.files.loading import load_model, load_tokenizer, max_positions
from lit_grpo.policy.files.model_source import ModelSource
from lit_grpo.policy.logprobs import completion_statistics, top_tokens
from lit_grpo.policy.policy import Policy
from lit_grpo.types import TokenBatch, UserError, setting_error
from lit_grpo.types.field_types import check_init
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.paths import at_home
from lit_grpo.types.plain import described

_KEY = "model.teacher.path"
_PROBE = "Wave 12 + 34: naïve façades,\n\tthen 5.6e-7 of them?"
_PROBED_TOKENS = 500


def as_teacher(given: object) -> Teacher | None:
    """Return the teacher that was given, or a local one for a path.

    Raises:
        UserError: it is something else.
    """
    if given is None or isinstance(given, Teacher):
        return given
    if isinstance(given, str | PathLike):
        return LocalTeacher(os.fspath(given))
    why = "it loads a model of its own, by its path: write LocalTeacher(path), of lit_grpo.policy"
    raise setting_error(
        "model.teacher", "a LocalTeacher, a VLLMTeacher or a path", described(given), why
    )


class TeacherFailed(Exception):
    """The teacher cannot read completions, and waiting longer is pointless."""


class Teacher(ABC):
    """A language model towards whose distribution the policy is trained.

    It must have the policy's vocabulary. Checkpoints do not contain it.
    """

    uses_packing = False
    """Whether batches for ``read`` may have as many tokens as a pack, which has no padding."""

    on_wait: Callable[[], None] = staticmethod(lambda: None)
    """The trainer's: ``read`` calls it now and then while it waits for a server. If the
    run must end, it raises an exception; let that propagate."""

    loaded_from: ModelSource | None = None
    """Source that ``load`` has read; None for a model in another process."""

    @abstractmethod
    def load(self, policy: Policy, *, temperature: float, top_k: int | None) -> None:
        """Prepare for a policy that is loaded; later calls do nothing.

        Args:
            temperature: Divides the logits.
            top_k: As in ``DistillationTerm``.

        Raises:
            UserError: the model is not there, or cannot teach this policy with these settings.
        """

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the weights, if they are in this process, to a device."""

    @property
    @abstractmethod
    def max_positions(self) -> int | None:
        """Most tokens of prompt and completion together; None for no limit."""

    @abstractmethod
    def read(self, batch: TokenBatch) -> list[Tensor]:
        """Read the completions of a batch on the CPU.

        Returns:
            [N, C] logprobs of the completion tokens or, with ``top_k``, the fields of `TopTokens`:
            those at the position of each completion token. 0 on padding.

        Raises:
            TeacherFailed: it cannot read them.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Release what ``load`` opened."""


@checks_keywords
class LocalTeacher(Teacher):
    """A teacher in the trainer's process, on the policy's device.

    A resumed run reads it from its path again.

    Args:
        path: Directory or hub id of the model.
        dtype: Data type of the weights. ``bfloat16`` halves the memory.
        trust_remote_code: Run the model code that comes with a hub model.
    """

    def __init__(
        self,
        path: str,
        dtype: Literal["float32", "bfloat16"] = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        check_init("model.teacher.init_args", LocalTeacher, locals())
        self.path = at_home(path)
        self.dtype = dtype
        self.trust_remote_code = trust_remote_code
        self.model: Any = None

    def load(self, policy: Policy, *, temperature: float, top_k: int | None) -> None:
        """Load the model.

        Raises:
            UserError: the model cannot be loaded, its head is not supported, or it has a different
                vocabulary from the policy.
        """
        if self.model is not None:
            return
        self._temperature = temperature
        self._top_k = top_k
        tokenizer = load_tokenizer(self.path, trust_remote_code=self.trust_remote_code, key=_KEY)
        _check_tokenizer(tokenizer, policy.tokenizer)
        model = load_model(
            self.path,
            dtype=self.dtype,
            attn_implementation=None,
            trust_remote_code=self.trust_remote_code,
            key=_KEY,
        )
        self.loaded_from = ModelSource.of(self.path)
        check_body_and_head(model)
        use_packing = policy.packing and runs_packs(model) and packs_match_padded(model)
        body_and_head = BodyAndHead(model, use_packing=use_packing)
        needed = policy.body_and_head.vocab_size
        if body_and_head.vocab_size < needed:
            raise UserError(
                f"the teacher must have logits for each of the policy's {needed} tokens, got "
                f"{body_and_head.vocab_size} (the policy may sample any of them). Set {_KEY} to a "
                "model of the same family."
            )
        self._vocab_size = needed
        self.uses_packing = body_and_head.uses_packing
        self.model, self.body_and_head = model.requires_grad_(False), body_and_head

    def to(self, device: torch.device) -> None:
        self.model.to(device)

    @property
    def max_positions(self) -> int | None:
        return max_positions(self.model.config)

    @torch.no_grad()
    def read(self, batch: TokenBatch) -> list[Tensor]:
        temperature = self._temperature
        if self._top_k is None:
            statistics = completion_statistics(self.body_and_head, batch, temperature=temperature)
            return [statistics.logprobs]
        found = top_tokens(
            self.body_and_head,
            batch,
            self._top_k,
            vocab_size=self._vocab_size,
            temperature=temperature,
        )
        return [one.cpu() for one in found]  # all of them might not fit on a GPU


def _check_tokenizer(teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Check that both tokenizers give a text the same ids.

    The teacher may have further tokens, as is common within a family of models.

    Raises:
        UserError: they do not.
    """
    known, text = teacher.get_vocab(), probe_text(policy)
    differing = [token for token, id in policy.get_vocab().items() if known.get(token) != id]
    if differing:
        example = f"in which {len(differing)} tokens differ, such as {differing[0]!r}"
        raise wrong_tokenizer(example, _KEY)
    ours, theirs = (one(text, add_special_tokens=False)["input_ids"] for one in (policy, teacher))
    if ours != theirs:
        raise wrong_tokenizer(f"that splits {text[:50]!r} differently", _KEY)


def probe_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text with tokens from all over a vocabulary, to compare tokenizers by."""
    step = max(1, len(tokenizer) // _PROBED_TOKENS)
    tokens = [str(tokenizer.decode([id])) for id in range(0, len(tokenizer), step)]
    return _PROBE + " ".join(tokens)


def wrong_tokenizer(difference: str, key: str) -> UserError:
    """Return the error for a teacher with another tokenizer than the policy's.

    Args:
        difference: How it differs, such as "that splits 'a b' differently".
        key: The setting that names the teacher.
    """
    return UserError(
        f"the teacher must have the policy's tokenizer, got one {difference} (it reads the ids of "
        f"the policy's tokens). Set {key} to a model of the same family as the policy."
    )
