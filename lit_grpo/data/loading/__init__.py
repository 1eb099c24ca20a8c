"""Load prompts in a deterministic order whose position can be saved."""
