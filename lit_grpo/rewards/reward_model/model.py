"""The model of ``ScorerReward``: load and check it, tokenize rows, run a padded forward pass.

It changes no global settings of torch, since the policy trains in the same process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_grpo.rewards.scoring.boundary import failed_scores
from lit_grpo.types import Completion, Outcome, Prompt, Score, UserError, check_range
from lit_grpo.types.tokenizer import starts_with_bos

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
    """The arguments of ``ScorerReward`` that concern the model."""

    path: str
    label: str | None
    activation: Activation | None
    device: str
    dtype: Dtype
    max_tokens: int | None
    trust_remote_code: bool


class Row(Protocol):
    """A prompt with the completion to score."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def completion(self) -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerModel:
    """A classifier and its tokenizer. Not thread-safe."""

    model: Any
    tokenizer: Any
    column: int
    """Column of the logits with the configured label."""
    activation: Activation
    max_tokens: int
    pad_token_id: int | None
    """None if the model has none."""
    num_embeddings: int
    """Size of the embedding table; on a GPU, a higher token id would crash the whole process."""

    def score(self, rows: Sequence[Row]) -> list[float | Score]:
        """Run one forward pass; rows that cannot be read get a ``Score`` without a value."""
        texts = [self._read(row) for row in rows]
        values: Iterator[float | Score]
        try:
            values = iter(self._values([text for text in texts if not isinstance(text, Score)]))
        except BaseException as error:  # the model may raise anything
            values = repeat(failed_scores(error, 1, 0.0)[0])
        return [text if isinstance(text, Score) else next(values) for text in texts]

    def stop(self) -> None:
        """Make every further layer raise, which ends a forward pass in flight."""
        for module in self.model.modules():
            module.register_forward_pre_hook(_refuse_to_run)

    def end_of_text(self, row: Row) -> str:
        """Return the last tokens of the model's input, decoded."""
        return str(self.tokenizer.decode(self._encode(row)["input_ids"][-NUM_SHOWN_TOKENS:]))

    def _read(self, row: Row) -> Mapping[str, list[int]] | Score:
        try:
            text = self._encode(row)
            self._check_ids(text["input_ids"])
        except Exception as error:  # a template may raise anything
            return failed_scores(error, 1, 0.0)[0]
        num_tokens = len(text["input_ids"])
        if num_tokens <= self.max_tokens:
            return text
        detail = f"prompt and completion have {num_tokens} tokens; max_tokens is {self.max_tokens}"
        return Score(value=None, outcome=Outcome.TRUNCATED, detail=detail)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ValueError("prompt and completion are both empty")
        if max(token_ids) >= self.num_embeddings:
            raise ValueError(
                f"token {max(token_ids)} is not in the scorer's vocabulary of "
                f"{self.num_embeddings}: it was trained with a different tokenizer"
            )

    def _encode(self, row: Row) -> Mapping[str, list[int]]:
        messages, text = row.prompt.messages, row.completion.text
        if messages is not None and self.tokenizer.chat_template:
            chat = _chat(self.tokenizer, [*messages, {"role": "assistant", "content": text}])
            return self._tokenize(chat, add_special_tokens=False)
        question = row.prompt.text
        if messages is not None:
            question = "\n\n".join(message["content"] for message in messages)
        if self.tokenizer.sep_token is not None:
            return self._tokenize(question, text)
        whole = question + ("" if messages is None else "\n\n") + text
        is_complete = starts_with_bos(whole, self.tokenizer)
        return self._tokenize(whole, add_special_tokens=not is_complete)

    def _tokenize(self, *texts: str, **settings: bool) -> Mapping[str, list[int]]:
        return cast(Mapping[str, list[int]], self.tokenizer(*texts, **settings))

    @torch.inference_mode()
    def _values(self, texts: Sequence[Mapping[str, list[int]]]) -> list[float]:
        if not texts:
            return []
        logits = self.model(**self._padded(texts)).logits.float()
        expected = [len(texts), self.model.config.num_labels]
        if list(logits.shape) != expected:
            raise ValueError(f"the scorer gave logits {list(logits.shape)}, not {expected}")
        return ACTIVATIONS[self.activation](logits)[:, self.column].tolist()

    def _padded(self, texts: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        """Return [rows, longest] tensors, padded on the right for absolute position embeddings."""
        pad = self.pad_token_id
        if pad is None:
            pad = _unused_as_last_token([text["input_ids"] for text in texts])
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


def _unused_as_last_token(rows: Sequence[Sequence[int]]) -> int:
    """Return a token id with which no row ends.

    The classification head of ``transformers`` reads the last token of a row that is not padding.
    With such a padding id that is the row's own last token, whatever the row ends with.
    """
    last = {row[-1] for row in rows}
    return next(token for token in range(len(last) + 1) if token not in last)


def _chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    return str(tokenizer.apply_chat_template([dict(one) for one in messages], tokenize=False))


def load_scorer(settings: ScorerSettings) -> ScorerModel:
    """Load a reward model and its tokenizer.

    Raises:
        UserError: there is none at the path, or a setting does not fit it.
    """
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


def outline_scorer(settings: ScorerSettings) -> Any:
    """Return the model that `load_scorer` loads, on the meta device; only its config is read.

    Raises:
        UserError: there is none at the path.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    remote = {"trust_remote_code": settings.trust_remote_code}
    with _loading(settings.path):
        config = AutoConfig.from_pretrained(settings.path, **remote)
        dtype = config.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        factory: Any = AutoModelForSequenceClassification  # its from_config is not annotated
        with torch.device("meta"):
            return factory.from_config(config, dtype=dtype or torch.float32, **remote)


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Convert loading errors to one that says what to set.

    A path that can only be a directory is never looked up on the Hub.
    """
    fix = (
        "Set ScorerReward.init_args.path to a directory with a sequence classifier and its "
        "tokenizer, or to the hub id of one."
    )
    exists = Path(path).exists()
    if not exists and (path.count("/") > 1 or path.startswith((".", "~", "/"))):
        raise UserError(f"path must be a reward model, got {path!r}, which does not exist. {fix}")
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        kind = "a local directory" if exists else "not a local directory, so looked up on the Hub"
        raise UserError(
            f"path must be a reward model, but {path!r} ({kind}) cannot be loaded as one: {error} "
            f"{fix}"
        ) from error


def _check_head(path: str, config: Any, missing: set[str]) -> None:
    if missing:
        raise UserError(
            f"path must be a sequence classifier with a trained head; {path} is a "
            f"{', '.join(config.architectures or ()) or config.model_type}, whose weights lack "
            f"{', '.join(sorted(missing))} (with random weights the values would be noise). Set "
            "ScorerReward.init_args.path to a reward model, whose config.json names an "
            "architecture …ForSequenceClassification."
        )


def _check_template(path: str, tokenizer: Any) -> None:
    probe = "lit-grpo-probe"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": probe}]
    if tokenizer.chat_template and probe not in _chat(tokenizer, turns):
        raise UserError(
            f"the chat template of {path} must include the assistant's turn, but leaves it out "
            "(all completions of a prompt would get one value). Fix chat_template in the scorer's "
            "directory."
        )


def _column(settings: ScorerSettings, labels: Sequence[str]) -> int:
    if settings.label is None and len(labels) == 1:
        return 0
    if settings.label not in labels:
        raise UserError(
            f"label must be one of {', '.join(labels)}, got {settings.label!r} (the reward is the "
            f"output of {settings.path} for one label). Set ScorerReward.init_args.label."
        )
    return labels.index(settings.label)


def _activation(settings: ScorerSettings, num_labels: int) -> Activation:
    if num_labels == 1 and settings.activation == "softmax":
        raise UserError(
            "activation must be none or sigmoid with one label, got softmax (every completion "
            "would get 1). Set ScorerReward.init_args.activation."
        )
    return settings.activation or ("none" if num_labels == 1 else "softmax")


def _max_tokens(settings: ScorerSettings, tokenizer: Any, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if settings.max_tokens is None:
        return int(min(positions, tokenizer.model_max_length))
    key, why = "ScorerReward.init_args.max_tokens", f"the context length of {settings.path}"
    check_range(key, settings.max_tokens, at_most=positions, why=why)
    return settings.max_tokens


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device must be one that this machine has, got {name!r}: {error} "
            "Set ScorerReward.init_args.device."
        ) from error
    return name
