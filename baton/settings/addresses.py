"""Addresses of servers as text: host:port. Pure."""


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address. The host may already have brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of an address of the form host:port, without brackets."""
    return address.rpartition(":")[0].strip("[]")
