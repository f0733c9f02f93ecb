"""Conversion of server addresses between the text host:port and its parts. All functions are pure."""


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address. The host may already have brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of an address of the form host:port. The brackets around an IPv6 address are removed."""
    return address.rpartition(":")[0].strip("[]")
