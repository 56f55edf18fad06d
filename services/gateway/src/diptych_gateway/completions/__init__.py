"""`/v1/chat/completions` and its older sibling `/v1/completions`."""
