"""Delivery of events from the engine to streams. A stream is kept for a while when its reader is lost, so that a new
reader can take it over."""
