"""Converts text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings. Never imports
torch."""
