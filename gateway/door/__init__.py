"""How requests come in: bounds on connections, headers and bodies, and who may call."""
