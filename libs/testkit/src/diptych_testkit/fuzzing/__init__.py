"""Fuzzers of every parser that faces the outside.

A *case* follows from a seed, a parser's name and a number alone, so that whatever fails is made
again by one command: `python -m diptych_testkit.fuzzing --parser chat --seed 7 --case 1234`.
"""
