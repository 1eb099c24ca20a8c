"""The files of a run, the trainer that writes them, its progress bar, resuming, and the report."""
