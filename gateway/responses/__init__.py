"""OpenAI's Responses API: answers as items, in a stream of typed events, kept for a while for later requests."""
