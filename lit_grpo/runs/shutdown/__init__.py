"""End a run early: signals, time limits, stalls."""
