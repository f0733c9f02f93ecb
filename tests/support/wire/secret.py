"""The secret of clusters that a test makes in its own process."""

from baton.transport.identity import ClusterSecret

SECRET = ClusterSecret("5ec" + "0" * 61)
