"""A local reward model as the reward: any sequence classifier of ``transformers``, in batches.

It never scores a text that was cut, nor with a head that was not trained. The model runs in a
thread of its own beside the policy and touches no global setting.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_grpo.rewards._boundary import failed_scores
from lit_grpo.rewards.reward import Reward
from lit_grpo.types import Completion, Outcome, Prompt, Score

Activation = Literal["none", "sigmoid", "softmax"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}
MIN_ALIKE_ROWS = 16
NUM_SHOWN_TOKENS = 60

_log = logging.getLogger(__name__)


class ScorerReward(Reward):
    """What a sequence classifier (``AutoModelForSequenceClassification``) makes of a completion.

    It reads a conversation through the chat template of its own tokenizer, with the completion as
    the assistant's turn. Without a template, or for a prompt that is plain text, it reads prompt
    and completion as a pair when its tokenizer has a separator (BERT), else one after the other;
    the turns of a conversation are then joined by empty lines, without the policy's markup.

    A text of more than ``max_tokens`` is not scored but has the outcome ``truncated``, since the
    score of a part is not the score of the completion.

    Args:
        path: directory or hub id of a reward model. A model without a trained classification
            head, such as a plain language model, is refused.
        label: which of several labels is the reward; needless with one.
        activation: what becomes of the logits: ``none``, ``sigmoid``, or ``softmax`` over the
            labels. ``none`` with one label and ``softmax`` with several when not given.
        device: ``auto`` is the current GPU, or the CPU without one; else as torch names it.
        dtype: of the weights; ``auto`` as they were saved.
        batch_size: completions a forward pass; as many as wait, up to this.
        max_tokens: of prompt and completion together; what the model can read when not given.
        trust_remote_code: run the model code that comes with a hub model.
    """

    def __init__(
        self,
        path: str,
        label: str | None = None,
        activation: Activation | None = None,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        batch_size: int = 16,
        max_tokens: int | None = None,
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        for setting, value in {"batch_size": batch_size, "max_tokens": max_tokens}.items():
            if value is not None and value < 1:
                raise ValueError(
                    f"{setting} must be >= 1, got {value}. Set {setting} in the init_args of "
                    "ScorerReward."
                )
        self.path = path
        self.label = label
        self.activation = activation
        self.device = device
        self.dtype = dtype
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.trust_remote_code = trust_remote_code
        self._scorer: _Scorer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._batching: asyncio.Task[None] | None = None
        self._waiting: list[_Row] = []
        self._alike = _AlikeRows()

    def start(self) -> None:
        """Loads the model, once.

        Raises:
            ValueError: nothing to load, not a scorer, or a setting that does not fit the model.
        """
        self._scorer = _load(self)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{self.name}")

    async def score(self, prompt: Prompt, completion: Completion) -> float | Score:
        if self._scorer is None:
            raise RuntimeError("ScorerReward is not started; call start() of its suite first")
        loop = asyncio.get_running_loop()
        row = _Row(prompt=prompt, completion=completion, result=loop.create_future())
        self._waiting.append(row)
        if self._batching is None or self._batching.done():
            self._batching = loop.create_task(self._score_batches(self._scorer))
        return await row.result

    async def close(self) -> None:
        """Forgets what waits, ends the batch in flight at its next layer and frees the model."""
        for pending in (self._batching, *(row.result for row in self._waiting)):
            if pending is not None:
                pending.cancel()
        if self._scorer is not None and self._thread is not None:
            self._scorer.stop()
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._scorer = self._thread = self._batching = None
        self._waiting = []

    async def _score_batches(self, scorer: _Scorer) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            try:
                scores = await loop.run_in_executor(self._thread, scorer.score, batch)
            except asyncio.CancelledError:
                for row in batch:
                    row.result.cancel()
                raise
            for row, score in zip(batch, scores, strict=True):
                row.deliver(score)
                self._watch(scorer, row, score)

    def _next_batch(self) -> list[_Row]:
        """The longest rows that wait, as rows of like length need little padding."""
        waiting = [row for row in self._waiting if not row.result.done()]
        waiting.sort(key=lambda row: row.num_characters)
        self._waiting = waiting[: -self.batch_size]
        return waiting[-self.batch_size :]

    def _watch(self, scorer: _Scorer, row: _Row, score: float | Score) -> None:
        if isinstance(score, Score) or not self._alike.add(row, score):
            return
        _log.warning(
            "reward %r gave %d completions in a row the value of another completion of their "
            "prompt, the last one %.6g: without a difference within a group nothing is learned. "
            "Its activation may saturate (set activation: none), its template may not suit the "
            "prompts, or it may know nothing of this task. It read: …%s",
            *(self.name, self._alike.count, score, scorer.end_of_text(row)),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """A completion that waits for its score."""

    prompt: Prompt
    completion: Completion
    result: asyncio.Future[float | Score]

    @property
    def num_characters(self) -> int:
        return len(self.prompt.text) + len(self.completion.text)

    def deliver(self, score: float | Score) -> None:
        if not self.result.done():
            self.result.set_result(score)


@dataclass(slots=True, kw_only=True)
class _AlikeRows:
    """Counts the rows since the scorer last told two completions of a prompt apart."""

    count: int = 0
    _first: dict[str, tuple[str, float]] = field(default_factory=dict)

    def add(self, row: _Row, value: float) -> bool:
        """Whether it is time to warn: at 16, 32, 64, … rows alike."""
        text, first = self._first.setdefault(row.prompt.id, (row.completion.text, value))
        if row.completion.text == text:
            return False
        if not math.isclose(value, first, rel_tol=1e-4, abs_tol=1e-6):
            self.count = 0
            self._first.clear()
            return False
        self.count += 1
        return self.count >= MIN_ALIKE_ROWS and self.count.bit_count() == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scorer:
    """The model with its tokenizer: texts in, numbers out. Used by one thread at a time."""

    model: Any
    tokenizer: Any
    column: int
    """Of the logits: the label that is the reward."""
    activation: Activation
    max_tokens: int
    pad_token_id: int | None
    """None when the model has none."""
    num_embeddings: int
    """A higher token id would end the process on a GPU, the policy with it."""

    def score(self, rows: Sequence[_Row]) -> list[float | Score]:
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

    def end_of_text(self, row: _Row) -> str:
        """The last tokens that the model read, decoded."""
        return self.tokenizer.decode(self._encode(row)["input_ids"][-NUM_SHOWN_TOKENS:])

    def _read(self, row: _Row) -> Mapping[str, list[int]] | Score:
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
            raise ValueError("prompt and completion are both empty")
        if max(token_ids) >= self.num_embeddings:
            raise ValueError(
                f"token {max(token_ids)} is not in the scorer's vocabulary of "
                f"{self.num_embeddings}: its tokenizer is not the one that it was trained with"
            )

    def _encode(self, row: _Row) -> Mapping[str, list[int]]:
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
            raise ValueError(f"the scorer gave logits {list(logits.shape)}, not {expected}")
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


def _load(reward: ScorerReward) -> _Scorer:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    device = _device(reward.device)
    remote = {"trust_remote_code": reward.trust_remote_code}
    with _loading(reward.path):
        tokenizer = AutoTokenizer.from_pretrained(reward.path, **remote)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            reward.path, dtype=reward.dtype, output_loading_info=True, **remote
        )
    _check_head(reward.path, model.config, report["missing_keys"])
    _check_template(reward.path, tokenizer)
    text_config = model.config.get_text_config()
    text_config.use_cache = False  # nothing is generated
    labels = [model.config.id2label[number] for number in range(model.config.num_labels)]
    return _Scorer(
        model=model.eval().requires_grad_(False).to(device),
        tokenizer=tokenizer,
        column=_column(reward, labels),
        activation=_activation(reward, len(labels)),
        max_tokens=_max_tokens(reward, tokenizer, text_config),
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
        raise ValueError(
            f"path must be a reward model, got {path!r}, which does not exist. {wanted}"
        )
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        kind = "directory" if is_there else "directory here or model on the hub"
        raise ValueError(
            f"path must be a reward model, but {path!r} ({kind}) cannot be loaded as one: {error} "
            f"{wanted}"
        ) from error


def _check_head(path: str, config: Any, missing: set[str]) -> None:
    if missing:
        raise ValueError(
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
        raise ValueError(
            f"the chat template of {path} must write the assistant's turn, it leaves it out (all "
            "completions of a prompt would get one value). Mend chat_template in the scorer's "
            "directory."
        )


def _column(reward: ScorerReward, labels: Sequence[str]) -> int:
    if reward.label is None and len(labels) == 1:
        return 0
    if reward.label not in labels:
        raise ValueError(
            f"label must be one of {', '.join(labels)}, got {reward.label!r} (the reward is what "
            f"{reward.path} says of one label). Set label in the init_args of ScorerReward."
        )
    return labels.index(reward.label)


def _activation(reward: ScorerReward, num_labels: int) -> Activation:
    if num_labels == 1 and reward.activation == "softmax":
        raise ValueError(
            f"activation: softmax needs several labels, {reward.path} has one (every completion "
            "would get 1). Set activation to none or sigmoid in the init_args of ScorerReward."
        )
    return reward.activation or ("none" if num_labels == 1 else "softmax")


def _max_tokens(reward: ScorerReward, tokenizer: Any, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if reward.max_tokens is None:
        return int(min(positions, tokenizer.model_max_length))
    if reward.max_tokens > positions:
        raise ValueError(
            f"max_tokens must be <= {positions}, which is all that {reward.path} can read, got "
            f"{reward.max_tokens}. Set max_tokens in the init_args of ScorerReward."
        )
    return reward.max_tokens


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device must be one that this machine has, got {name!r}: {error} Set device in the "
            "init_args of ScorerReward."
        ) from error
    return name
