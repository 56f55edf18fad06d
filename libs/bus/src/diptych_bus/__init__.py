"""The bus: a port, and its adapters `jetstream` and `memory`, proved equal by `tests/parity`."""
