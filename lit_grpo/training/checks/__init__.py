"""Checks of a training run's settings: against each other, and against a resumed run's."""
