"""What a run shows afterwards: curves, tables, comparison, page and model card."""
