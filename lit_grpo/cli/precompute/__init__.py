"""The command ``lit-grpo precompute``: gold scores of stored answers, in a cache on disk."""
