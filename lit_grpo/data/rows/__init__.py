"""Read rows from files and datasets, and find values in them."""
