"""Moves KV blocks from a prefill worker into a decode worker, verified."""
