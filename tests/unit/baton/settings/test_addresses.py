"""Addresses as text: how host and port are joined, and the host is found again."""

import pytest

from baton.settings.addresses import host_of, join_address


@pytest.mark.parametrize(
    ("host", "address", "bare"),
    [
        ("127.0.0.1", "127.0.0.1:80", "127.0.0.1"),
        ("head", "head:80", "head"),
        ("::1", "[::1]:80", "::1"),
        ("[::1]", "[::1]:80", "::1"),
        ("fe80::1%eth0", "[fe80::1%eth0]:80", "fe80::1%eth0"),
    ],
)
def test_an_ipv6_address_has_brackets_before_its_port(host: str, address: str, bare: str) -> None:
    assert join_address(host, 80) == address
    assert host_of(address) == bare
