"""A stand-in for ssh's tunnel: forwards connections between ports until it is killed."""

import asyncio
import sys
from functools import partial


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _pass_on(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there, back = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _serve(here: int, there: int) -> None:
    server = await asyncio.start_server(partial(_pass_on, there), "127.0.0.1", here)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
