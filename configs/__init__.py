"""The experiments that ship: one complete YAML each, and presets to merge over them."""
