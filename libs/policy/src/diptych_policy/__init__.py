"""Decisions: events in, effects out. No I/O, no clock: the simulator runs the same objects."""
