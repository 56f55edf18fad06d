"""`/v1/batches`: what a client sees of a batch, which run here, and how one runs."""
