"""Inference servers over HTTP: launch, supervise, restart and update them."""
