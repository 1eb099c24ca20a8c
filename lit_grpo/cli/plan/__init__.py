"""What a step will cost: memory by part and seconds by part, from a model of the step."""
