"""Optimizer steps: their settings, float32 masters, and steps that are left out."""
