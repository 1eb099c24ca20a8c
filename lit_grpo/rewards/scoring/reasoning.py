"""Find the answer of a completion: what follows the reasoning of a thinking model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lit_grpo.types import Completion, Prompt, UserError
from lit_grpo.types.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags around a policy's reasoning, such as ``<think>`` and ``</think>``.

    The answer is the text after the last tag. It is empty if that tag opens a thought that never
    ends. Text between two thoughts is not part of it: the policy resumed thinking.

    Example::

        <think>2 + 2</think>It is 4.     ->  It is 4.
        2 + 2</think>It is 4.            ->  It is 4.   the prompt may end with <think>
        <think>2 + 2                     ->
        2 + 2                            ->             if the prompt ends with <think>
        2 + 2                            ->  2 + 2      otherwise
    """

    open_tag: str
    close_tag: str
    tokenizer: Tokenizer

    def answer(self, prompt: Prompt, completion: Completion) -> Completion:
        """Return the completion without its reasoning, or itself if it has none.

        It then has the tokens of the answer's text; their logprobs and versions are unknown.
        """
        text = completion.text
        if self.open_tag not in text and self.close_tag not in text and not self.starts_in(prompt):
            return completion
        _, is_closed, rest = text.rpartition(self.close_tag)
        answer = rest.lstrip() if is_closed and self.open_tag not in rest else ""
        token_ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return replace(
            completion,
            text=answer,
            token_ids=tuple(token_ids),
            sampler_logprobs=(),
            policy_versions=(),
        )

    def starts_in(self, prompt: Prompt) -> bool:
        """Return whether a completion of this prompt starts inside a thought."""
        return prompt.text.rstrip().endswith(self.open_tag)

    def continuation(self, prompt: Prompt, text: str) -> str:
        """Return a text without the opening tag that the prompt already has."""
        if not self.starts_in(prompt):
            return text
        tail = prompt.text[prompt.text.rindex(self.open_tag) :]
        opening = tail if text.startswith(tail) else self.open_tag
        return text.removeprefix(opening)

    def check(self) -> None:
        """Check that the tags appear in the text of completions.

        Raises:
            UserError: the tokenizer leaves one out of the text.
        """
        special = {
            token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special
        }
        for tag in (self.open_tag, self.close_tag):
            if tag in special:
                raise UserError(
                    f"reasoning_tags must be text, but {tag!r} is a special token of the "
                    "tokenizer (these are left out of the text that rewards see, so reasoning "
                    'cannot be told from the answer). Set "special": false for it in the '
                    "tokenizer.json and tokenizer_config.json of model.policy.tokenizer, or "
                    "model.policy.reasoning_tags: null to keep the reasoning in every reward."
                )
