"""Engines that are not there: servers that obey their contracts to the letter, bad habits included.

What a real server would ignore, or repair in silence, is a fault here, and a test fails by it.
"""
