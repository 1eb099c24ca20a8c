"""Rollouts by vLLM, in this process or as a server."""
