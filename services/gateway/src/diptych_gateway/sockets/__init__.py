"""WebSockets, with requests in lanes: responses, and chat."""
