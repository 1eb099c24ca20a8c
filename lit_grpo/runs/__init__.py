"""What a run leaves behind: metrics, completions, checkpoints, a final model, and its report."""
