"""Rollouts by the policy's own ``transformers`` model."""
