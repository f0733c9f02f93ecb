"""Attends to some keys only: InfiniGen and what it is compared with."""
