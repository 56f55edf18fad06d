"""Engines behind one port. `step_loop` makes a request-level `Engine` of a `StepEngine`."""
