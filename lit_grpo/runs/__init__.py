"""The files of a run, the trainer that writes them, resuming, and the report."""
