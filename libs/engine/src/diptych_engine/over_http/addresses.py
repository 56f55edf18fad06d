"""Where an engine listens, and its key: looked at before anything waits for an engine there."""

from urllib.parse import urlsplit

from diptych_contracts.errors import Permanent


def http_url(url: str, setting: str) -> str:
    """`url` without a slash at its end.

    Args:
        url: As it was set.
        setting: Its name. What is wrong is said without the URL: it may hold a password.

    Raises:
        Permanent: nothing can listen there; one clear line.
    """
    expected = f"{setting}: expected http://host:port or https://host:port"
    if not url.isascii() or not url.isprintable() or " " in url:
        raise Permanent(f"{expected}, got characters that no URL has")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as err:
        raise Permanent(f"{expected}: {err}") from err
    if parts.scheme not in ("http", "https"):
        raise Permanent(f"{expected}, got none of these two at its beginning")
    if parts.username is not None or parts.password is not None:
        raise Permanent(f"{expected}, got a user or a password, which logs would tell")
    if not parts.hostname or port == 0:
        raise Permanent(f"{expected}, got no {'port' if parts.hostname else 'host'}")
    if parts.query or parts.fragment:
        raise Permanent(f"{expected}, got a query or a fragment")
    return url.rstrip("/")


def bracketed(host: str) -> str:
    """`host` as it stands in a URL: an IPv6 address has brackets there."""
    return f"[{host}]" if ":" in host else host


def key_header(api_key: str) -> dict[str, str]:
    """The header that tells `api_key`; none without one.

    Raises:
        Permanent: no header can. The key itself is not told.
    """
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise Permanent(
            "api_key: expected printable ASCII without spaces, got something else "
            "(a line feed at its end, perhaps)"
        )
    return {"Authorization": f"Bearer {api_key}"}
