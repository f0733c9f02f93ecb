"""Secret by which the processes of one cluster recognise each other. The launcher creates it. It is sent as metadata
with each call between the processes, and checked before the call's message is read.

Servers of workers check the secret (`baton.transport.channel.make_server`), and the orchestrator checks it for the
methods that operators call (`orchestrator.api.access`). Channels to these servers send it
(`baton.transport.channel.make_channel`). docs/security.md describes where the secret is stored. Does no I/O.
"""

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.errors import ConfigError, UnauthenticatedError

SECRET_KEY = "baton-cluster-secret"
_FORM = "[0-9a-f]{64}"

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class ClusterSecret:
    """Secret of one cluster, as 64 hexadecimal digits. The digits are not shown by repr().

    Raises ConfigError for a text that does not have this form. The error message does not contain the text.
    """

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if re.fullmatch(_FORM, self.text) is None:
            what = f"{len(self.text)} characters" if self.text else "nothing"
            raise ConfigError(f"the cluster's secret is {what}: give the 64 hexadecimal digits that its launcher made")

    @classmethod
    def new(cls) -> "ClusterSecret":
        """Return a new secret of 256 random bits."""
        return cls(secrets.token_hex(32))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that a caller sends with each call, to prove that it belongs to the cluster."""
        return ((SECRET_KEY, self.text),)

    def is_in(self, metadata: Metadata) -> bool:
        """Return True if the metadata of a call contains the secret. The time of the comparison does not depend on how
        many characters are correct."""
        given = dict(metadata).get(SECRET_KEY, "")
        presented = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(presented, self.text.encode())

    def check(self, method: str, metadata: Metadata) -> None:
        """Raise UnauthenticatedError unless the metadata of a call contains the secret. Implements
        `status_interceptor.Check`."""
        if not self.is_in(metadata):
            raise UnauthenticatedError(
                f"{method.rpartition('/')[2]} is for processes of this cluster: send its secret as {SECRET_KEY}"
            )
