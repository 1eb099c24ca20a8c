"""Rewards that ask a language model: a grade, a rubric, a ranking, rubric alignment."""
