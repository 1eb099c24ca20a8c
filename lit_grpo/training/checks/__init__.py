"""Checks of a training's settings: against each other, and against a resumed run's."""
