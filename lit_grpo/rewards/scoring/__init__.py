"""Score rollout steps: run the rewards while generation goes on, and decide which rows count."""
