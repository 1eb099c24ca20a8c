"""Measure rows with scores, and how often a policy is right on them."""
