"""The commands that try the rewards of a config: rewards, judge-check and rescore."""
