"""Text to token ids and back, beyond what a tokenizer does."""
