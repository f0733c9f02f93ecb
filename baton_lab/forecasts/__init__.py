"""Predictions of step and prefill times, also for hardware that this machine does not have (`baton plan`, `baton
simulate`)."""
