"""The files that a run writes, and the callbacks that write them."""
