"""Formats of quantised weights in Hugging Face model folders. The weights are dequantised when a model is loaded."""
