"""The policy's weights on their way to an engine: by name, in files, or in host memory."""
