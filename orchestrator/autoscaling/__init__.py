"""Decides how many groups of each role there should be, and says why; changes nothing itself."""
