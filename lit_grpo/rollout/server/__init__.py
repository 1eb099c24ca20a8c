"""Inference servers over HTTP: launched, supervised, restarted, and given checked weights."""
