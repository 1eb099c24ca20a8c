"""Bundled configs: complete experiments, and presets, rewards and engines to merge into them."""
