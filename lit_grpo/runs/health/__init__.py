"""Trouble in a run, and what is done about it."""
