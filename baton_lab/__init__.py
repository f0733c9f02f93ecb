"""Studies of Baton and loads on it: simulators, chaos, quality, forecasts, a load generator, the demonstration. Nothing
that serves imports it."""
