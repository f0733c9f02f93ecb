"""Turns text into token ids and back: tokenizer, chat template, incremental detokenizer, stop strings (never torch)."""
