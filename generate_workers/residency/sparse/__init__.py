"""Residency policies with which sequences attend only to selected keys (InfiniGen)."""
