"""A call becomes a stored request: its model, tokens, limits, a place, and JetStream's word."""
