"""Detect trouble during a run and act on it."""
