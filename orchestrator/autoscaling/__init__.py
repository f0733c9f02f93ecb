"""Decides how many groups of each role are needed, and explains why. Does not change groups itself."""
