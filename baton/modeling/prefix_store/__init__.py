"""Prefix store: keeps the KV of earlier prompts in files that all workers of a node share."""
