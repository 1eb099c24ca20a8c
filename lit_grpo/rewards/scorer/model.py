"""The model of a local reward: loading and refusing it, reading a row, one padded forward pass.

It knows nothing of queues, and touches no global setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_grpo.rewards.scoring.boundary import failed_scores
from lit_grpo.types import Completion, Outcome, Prompt, Score, UserError

Activation = Literal["none", "sigmoid", "softmax"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
NUM_SHOWN_TOKENS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSettings:
    """What ``ScorerReward`` is told of its model."""

    path: str
    label: str | None
    activation: Activation | None
    device: str
    dtype: Dtype
    max_tokens: int | None
    trust_remote_code: bool


class Row(Protocol):
    """What is read of a completion that waits for its score."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def completion(self) -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerModel:
    """The model with its tokenizer: texts in, numbers out. Used by one thread at a time."""

    model: Any
    tokenizer: Any
    column: int
    """Of the logits: the label that is the settings."""
    activation: Activation
    max_tokens: int
    pad_token_id: int | None
    """None when the model has none."""
    num_embeddings: int
    """A higher token id would end the process on a GPU, the policy with it."""

    def score(self, rows: Sequence[Row]) -> list[float | Score]:
        """One forward pass over the rows that can be read; a Score without a value for others."""
        texts = [self._read(row) for row in rows]
        values: Iterator[float | Score]
        try:
            values = iter(self._values([text for text in texts if not isinstance(text, Score)]))
        except BaseException as error:  # the model may raise anything, and later rows must go on
            values = repeat(failed_scores(error, 1, 0.0)[0])
        return [text if isinstance(text, Score) else next(values) for text in texts]

    def stop(self) -> None:
        """Makes every further layer raise, that of a pass in flight too."""
        for module in self.model.modules():
            module.register_forward_pre_hook(_refuse_to_run)

    def end_of_text(self, row: Row) -> str:
        """The last tokens that the model read, decoded."""
        return self.tokenizer.decode(self._encode(row)["input_ids"][-NUM_SHOWN_TOKENS:])

    def _read(self, row: Row) -> Mapping[str, list[int]] | Score:
        try:
            text = self._encode(row)
            self._check_ids(text["input_ids"])
        except Exception as error:  # a template may raise anything
            return failed_scores(error, 1, 0.0)[0]
        num_tokens = len(text["input_ids"])
        if num_tokens <= self.max_tokens:
            return text
        detail = f"prompt and completion have {num_tokens} tokens, max_tokens is {self.max_tokens}"
        return Score(value=None, outcome=Outcome.TRUNCATED, detail=detail)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise UserError("prompt and completion are both empty")
        if max(token_ids) >= self.num_embeddings:
            raise UserError(
                f"token {max(token_ids)} is not in the scorer's vocabulary of "
                f"{self.num_embeddings}: its tokenizer is not the one that it was trained with"
            )

    def _encode(self, row: Row) -> Mapping[str, list[int]]:
        messages, text = row.prompt.messages, row.completion.text
        if messages is not None and self.tokenizer.chat_template:
            chat = _chat(self.tokenizer, [*messages, {"role": "assistant", "content": text}])
            return self.tokenizer(chat, add_special_tokens=False)
        question = row.prompt.text
        if messages is not None:
            question = "\n\n".join(message["content"] for message in messages)
        if self.tokenizer.sep_token is not None:
            return self.tokenizer(question, text)
        return self.tokenizer(question + ("" if messages is None else "\n\n") + text)

    @torch.inference_mode()
    def _values(self, texts: Sequence[Mapping[str, list[int]]]) -> list[float]:
        if not texts:
            return []
        logits = self.model(**self._padded(texts)).logits.float()
        expected = [len(texts), self.model.config.num_labels]
        if list(logits.shape) != expected:
            raise UserError(f"the scorer gave logits {list(logits.shape)}, not {expected}")
        return ACTIVATIONS[self.activation](logits)[:, self.column].tolist()

    def _padded(self, texts: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        """[rows, longest] each, padded on the right, which suits absolute positions too."""
        pad = self.pad_token_id
        if pad is None:
            pad = _ending_none([text["input_ids"] for text in texts])
            self.model.config.get_text_config().pad_token_id = pad
        return {
            name: pad_sequence(
                [torch.tensor(text[name]) for text in texts],
                batch_first=True,
                padding_value=pad if name == "input_ids" else 0,
            ).to(self.model.device)
            for name in texts[0]
        }


def _refuse_to_run(*_: object) -> None:
    raise RuntimeError("the scorer was closed")


def _ending_none(rows: Sequence[Sequence[int]]) -> int:
    """A token id that is the last of no row.

    A model without a padding token reads the last token of a text alone, and the last that is not
    padding in a batch: with such an id both are the same token, whatever the texts end with.
    """
    last = {row[-1] for row in rows}
    return next(token for token in range(len(last) + 1) if token not in last)


def _chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    return tokenizer.apply_chat_template([dict(one) for one in messages], tokenize=False)


def load_scorer(settings: ScorerSettings) -> ScorerModel:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    device = _device(settings.device)
    remote = {"trust_remote_code": settings.trust_remote_code}
    with _loading(settings.path):
        tokenizer = AutoTokenizer.from_pretrained(settings.path, **remote)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            settings.path, dtype=settings.dtype, output_loading_info=True, **remote
        )
    _check_head(settings.path, model.config, report["missing_keys"])
    _check_template(settings.path, tokenizer)
    text_config = model.config.get_text_config()
    text_config.use_cache = False  # nothing is generated
    labels = [model.config.id2label[number] for number in range(model.config.num_labels)]
    return ScorerModel(
        model=model.eval().requires_grad_(False).to(device),
        tokenizer=tokenizer,
        column=_column(settings, labels),
        activation=_activation(settings, len(labels)),
        max_tokens=_max_tokens(settings, tokenizer, text_config),
        pad_token_id=text_config.pad_token_id,
        num_embeddings=model.get_input_embeddings().weight.shape[0],
    )


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Says what to set when nothing can be loaded; asks no hub for what can only be a directory."""
    wanted = (
        "Set path in the init_args of ScorerReward to a directory with a sequence classifier and "
        "its tokenizer, or to the hub id of one."
    )
    is_there = Path(path).exists()
    if not is_there and (path.count("/") > 1 or path.startswith((".", "~", "/"))):
        raise UserError(
            f"path must be a reward model, got {path!r}, which does not exist. {wanted}"
        )
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        kind = "directory" if is_there else "directory here or model on the hub"
        raise UserError(
            f"path must be a reward model, but {path!r} ({kind}) cannot be loaded as one: {error} "
            f"{wanted}"
        ) from error


def _check_head(path: str, config: Any, missing: set[str]) -> None:
    if missing:
        raise UserError(
            f"path must be a sequence classifier with a trained head, {path} is a "
            f"{', '.join(config.architectures or ()) or config.model_type}, whose weights lack "
            f"{', '.join(sorted(missing))} (drawn at random, they would give every completion "
            "noise or one value). Set path in the init_args of ScorerReward to a reward model, "
            "one whose config.json names an architecture …ForSequenceClassification."
        )


def _check_template(path: str, tokenizer: Any) -> None:
    probe = "lit-grpo-probe"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": probe}]
    if tokenizer.chat_template and probe not in _chat(tokenizer, turns):
        raise UserError(
            f"the chat template of {path} must write the assistant's turn, it leaves it out (all "
            "completions of a prompt would get one value). Mend chat_template in the scorer's "
            "directory."
        )


def _column(settings: ScorerSettings, labels: Sequence[str]) -> int:
    if settings.label is None and len(labels) == 1:
        return 0
    if settings.label not in labels:
        raise UserError(
            f"label must be one of {', '.join(labels)}, got {settings.label!r} (the reward is what "
            f"{settings.path} says of one label). Set label in the init_args of ScorerReward."
        )
    return labels.index(settings.label)


def _activation(settings: ScorerSettings, num_labels: int) -> Activation:
    if num_labels == 1 and settings.activation == "softmax":
        raise UserError(
            f"activation: softmax needs several labels, {settings.path} has one (every completion "
            "would get 1). Set activation to none or sigmoid in the init_args of ScorerReward."
        )
    return settings.activation or ("none" if num_labels == 1 else "softmax")


def _max_tokens(settings: ScorerSettings, tokenizer: Any, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if settings.max_tokens is None:
        return int(min(positions, tokenizer.model_max_length))
    if settings.max_tokens > positions:
        raise UserError(
            f"max_tokens must be <= {positions}, which is all that {settings.path} can read, got "
            f"{settings.max_tokens}. Set max_tokens in the init_args of ScorerReward."
        )
    return settings.max_tokens


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device must be one that this machine has, got {name!r}: {error} Set device in the "
            "init_args of ScorerReward."
        ) from error
    return name
