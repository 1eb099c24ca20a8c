"""Prompts whose groups have an advantage or none, by their kind."""

from tiny import prompt

from lit_grpo.rewards import Reward


class EasyPromptsTeachNothing(Reward):
    """All completions of a prompt whose id begins with "easy" are equally good, no two of another
    prompt are."""

    def score(self, prompt, completion):
        return 1.0 if prompt.id.startswith("easy") else sum(completion.token_ids) / 1e4


def prompts(kinds: str):
    """One prompt a letter: e is easy, h is hard; ids count."""
    names = {"e": "easy", "h": "hard"}
    return [prompt(f"{i}+1=", id=f"{names[kind]}{i}") for i, kind in enumerate(kinds)]
