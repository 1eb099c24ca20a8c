"""Communicate between the ranks of a run, and shard a model over them."""
