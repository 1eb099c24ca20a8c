"""Rewards from a language model as judge: grades, rubrics, rankings, rubric alignment."""
