"""Turn rows into prompts."""
