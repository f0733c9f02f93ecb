"""Tools in a chat: which a request offers, how the model is told of them, and what a choice of tool obliges it to."""
