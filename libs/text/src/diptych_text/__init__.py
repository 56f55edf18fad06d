"""Text to tokens and back: chat template, tokenizer, detokenizer, stop strings."""
