"""The front door: HTTP, SSE and WebSockets. Holds nothing that another gateway could not read."""
