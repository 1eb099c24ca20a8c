"""Attention of several completions in one row of tokens, each distinct prefix once."""
