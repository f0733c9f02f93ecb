"""Text at both ends: tokenizer, chat template, incremental detokenizer, stop strings (layer 1: never torch)."""
