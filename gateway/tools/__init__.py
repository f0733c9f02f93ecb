"""Tools in a chat: the tools that a request offers, their description for the model, and the form of required tool
calls."""
