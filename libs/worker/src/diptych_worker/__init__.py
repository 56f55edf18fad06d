"""What both workers share: admission, the engine's news, hand-off, registration, drain."""
