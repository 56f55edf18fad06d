"""`make chaos`: the real stack under faults at random moments, and what its clients saw of them.

Pure: `plan` (which faults, when), `asking` (which requests), `checking`, `pauses`, `alarms` and
`table`. The rest moves things: `crew` (processes), `clients`, `watching` (the bus), `running`.
"""
