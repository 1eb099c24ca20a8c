"""Easy prompts, whose groups have no advantage, and hard ones, whose groups have."""

from tiny import prompt

from lit_grpo.rewards import Reward


class EqualOnEasyPrompts(Reward):
    """Gives equal rewards to prompts whose ids begin with "easy", and unequal ones to others."""

    def score(self, prompt, completion):
        return 1.0 if prompt.id.startswith("easy") else sum(completion.token_ids) / 1e4


def prompts(kinds: str):
    """Return one prompt per letter, easy for e and hard for h, with numbered ids."""
    names = {"e": "easy", "h": "hard"}
    return [prompt(f"{i}+1=", id=f"{names[kind]}{i}") for i, kind in enumerate(kinds)]
