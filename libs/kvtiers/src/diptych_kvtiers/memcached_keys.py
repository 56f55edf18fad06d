"""Every key of a memcached; may block.

Over a socket of its own: of a long answer, pymemcache 4.0's `raw_command` gives the last piece.
"""

import socket
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from pymemcache.exceptions import MemcacheServerError

_COMMAND, _END = b"lru_crawler metadump all\r\n", b"END\r\n"
_BEGINNING = b"key="


def all_keys(host: str, port: int, *, timeout_s: float) -> Iterator[str]:
    """The keys, as the server's crawler comes past them.

    Raises:
        OSError: it does not answer.
        MemcacheServerError: it is old, busy or its crawler is off: it lists nothing.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as asking:
        asking.sendall(_COMMAND)
        with asking.makefile("rb") as lines:
            for line in lines:
                if line == _END:
                    return
                if not line.startswith(_BEGINNING):
                    raise MemcacheServerError(f"its keys cannot be listed: {line[:80]!r}")
                key = line.partition(b" ")[0].removeprefix(_BEGINNING)
                yield unquote_to_bytes(key).decode("latin-1")
    raise ConnectionError("it hung up while it listed its keys")
