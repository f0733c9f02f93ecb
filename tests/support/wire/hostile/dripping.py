"""Clients of the HTTP gateway that send the body of a request very slowly."""

import asyncio

from tests.support.wire.http_gateway import HOST

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def dripping(port: int, num_bytes: int, drip_s: float, address: str = HOST) -> bytes:
    """Begin a body of a megabyte with `num_bytes` bytes, then send a byte every `drip_s` seconds. Return the status
    line of the answer. It is empty if the connection is closed first. `address`: own address of the client."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(address, 0))

    async def drip() -> None:
        writer.write(HEAD + b"content-length: 1000000\r\n\r\n" + b" " * num_bytes)
        while True:
            await writer.drain()
            await asyncio.sleep(drip_s)
            writer.write(b" ")

    dripped = asyncio.create_task(drip())
    try:
        return await reader.readline()
    except ConnectionResetError:
        return b""
    finally:
        dripped.cancel()
        await asyncio.gather(dripped, return_exceptions=True)
        writer.close()
