"""Prepare the policy's weights for an engine: by name, in files, or in host memory."""
