"""Texts in, no answer generated: `/v1/embeddings`, `/tokenize` and `/detokenize`."""
