"""Rewards that are functions, also such as were written for TRL or verl."""
