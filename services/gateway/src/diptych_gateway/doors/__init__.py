"""Every path, what `/openapi.json` says of it, and what stands around all of them."""
