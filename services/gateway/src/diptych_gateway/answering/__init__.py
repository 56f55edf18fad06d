"""Tokens become answers: streams, their timers, chat's objects, and the way out to a client."""
