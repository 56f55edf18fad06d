"""Requests sent twice run once: the header `Idempotency-Key`, its claims, and who joins."""
