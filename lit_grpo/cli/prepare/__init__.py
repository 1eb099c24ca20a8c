"""The command ``lit-grpo prepare``: recipes of training data."""
