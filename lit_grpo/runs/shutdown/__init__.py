"""Why a run ends early: a signal, its time, a stall."""
