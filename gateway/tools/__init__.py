"""Tools in a chat: those that a request offers, their description to the model, and the form of required calls."""
