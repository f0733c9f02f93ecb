"""Predicts steps and prefills on hardware that need not be there (`baton plan`, `baton simulate`)."""
