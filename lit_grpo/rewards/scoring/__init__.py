"""Score rollout steps: run the rewards during generation, and decide which rows count."""
