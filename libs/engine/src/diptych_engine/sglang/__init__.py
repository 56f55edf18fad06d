"""SGLang over HTTP: prefill and decode are asked at once, and meet in a room."""
