"""Checks of a training's settings: against each other, and against those of a resumed run."""
