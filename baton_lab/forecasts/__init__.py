"""Predicts the times of steps and prefills, also for hardware that is not present (`baton plan`, `baton simulate`)."""
