"""Ask a service on this host whether it serves: `python -m diptych_chassis.probe SERVICE`.

For a container's health check, in an image that has no curl. Prints the answer; the exit code is 0
if the service is ready, 1 if it is not. Like `tether` it starts in milliseconds, since it runs
every few seconds, so it reads the two variables it needs by itself.
"""

import os
import socket
import sys
from collections.abc import Mapping

_HOST = "127.0.0.1"
_TIMEOUT_S = 2.0
_USAGE = "usage: python -m diptych_chassis.probe SERVICE"
_REQUEST = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def main(arguments: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """Probe the service named by the only argument; gives the exit code."""
    if len(arguments) != 1:
        sys.stderr.write(_USAGE + "\n")
        return 2
    port = health_port(arguments[0], environ)
    if port is None:
        sys.stderr.write(f"HEALTH_PORT of {arguments[0]} is not set: nobody knows where to ask\n")
        return 2
    try:
        status, body = ready(port)
    except (OSError, ValueError) as err:
        sys.stderr.write(f"no answer on port {port}: {err}\n")
        return 1
    sys.stdout.write(body + "\n")
    return 0 if status == 200 else 1


def health_port(service: str, environ: Mapping[str, str]) -> int | None:
    """The port of `service`'s probes (hyphenated name); None if it takes a free one."""
    own = f"DIPTYCH_{service.upper().replace('-', '_')}__HEALTH_PORT"
    told = environ.get(own) or environ.get("DIPTYCH_ALL__HEALTH_PORT", "")
    return int(told) if told.isdigit() and told != "0" else None


def ready(port: int) -> tuple[int, str]:
    """Status and body of the readiness page.

    Raises:
        OSError: nobody answers within two seconds.
        ValueError: what answers does not speak HTTP.
    """
    with socket.create_connection((_HOST, port), timeout=_TIMEOUT_S) as link:
        link.sendall(_REQUEST)
        with link.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    version, _, rest = head.partition(b" ")
    if not version.startswith(b"HTTP/"):
        raise ValueError(f"expected HTTP, got {head[:40]!r}")
    return int(rest[:3]), body.decode("utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
