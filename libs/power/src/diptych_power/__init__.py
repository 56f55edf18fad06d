"""Reads and caps the power of a worker's device."""
