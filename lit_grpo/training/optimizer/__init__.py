"""Optimizer steps: their settings, float32 masters, and those that are left out."""
