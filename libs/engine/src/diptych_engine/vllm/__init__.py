"""vLLM over HTTP: its NIXL connector moves KV from worker to worker."""
