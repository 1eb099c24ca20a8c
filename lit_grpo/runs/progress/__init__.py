"""The activity of a run: for the progress bar and the watchdog."""
