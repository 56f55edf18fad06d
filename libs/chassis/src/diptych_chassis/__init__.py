"""What every process has around its service: settings, beats, probes, signals, a clean end.

Nothing is imported here: `python -m diptych_chassis.tether` must start in milliseconds.
"""
