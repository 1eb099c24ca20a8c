"""Diagnose a step or a run: findings, their causes, and what to do about them."""
