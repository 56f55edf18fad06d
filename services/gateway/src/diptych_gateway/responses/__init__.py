"""`/v1/responses`: a response's body, history, events, objects and routes."""
