"""Collect the rollouts of a step: sampled ahead or now, scored, and waited for."""
