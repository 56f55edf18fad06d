"""Bytes come in: the HTTP server, what a connection may send, bodies read within limits."""
