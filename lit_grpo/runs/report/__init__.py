"""Reports on runs: curves, tables, comparison, page and model card."""
