"""Estimate what a step will cost, from a model of the step: memory and seconds, by part."""
