"""Estimate the memory and the seconds of a step from a config, for `plan` and `doctor`."""
