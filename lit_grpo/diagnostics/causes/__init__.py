"""Known causes of trouble: what each means, what to do, and what the run does about it."""
