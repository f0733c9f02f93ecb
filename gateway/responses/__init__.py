"""OpenAI's Responses API. Answers consist of items, are streamed as typed events, and are stored for a limited time for
later requests."""
