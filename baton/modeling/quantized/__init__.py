"""Formats of quantised weights in Hugging Face folders, dequantised as they are loaded."""
