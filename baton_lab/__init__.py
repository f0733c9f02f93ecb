"""Tools around Baton that no serving code imports: simulators, fault injection, quality evaluation, forecasts, a load
generator and the demonstration."""
