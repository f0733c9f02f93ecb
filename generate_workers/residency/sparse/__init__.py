"""Attend to some keys only: InfiniGen and the policies that it is compared with."""
