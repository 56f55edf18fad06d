"""Keeps KV blocks beyond a worker's own memory: host memory, disk, stores that a fleet shares."""
