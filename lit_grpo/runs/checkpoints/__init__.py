"""Write, find, verify and resume from checkpoints, and roll back to one."""
