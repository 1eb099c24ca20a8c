"""Functions as rewards, including those written for TRL or verl."""
