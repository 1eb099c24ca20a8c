"""What a run is doing: on the progress bar and for the watchdog."""
