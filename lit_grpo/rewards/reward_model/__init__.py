"""A local reward model that scores completions in batches."""
