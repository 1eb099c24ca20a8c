"""Run sync rewards in worker processes, which may hang or crash without harm to the trainer."""
