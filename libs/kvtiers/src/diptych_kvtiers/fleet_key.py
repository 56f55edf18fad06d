"""The key that a fleet's entries are sealed with: a file of 64 hexadecimal digits."""

from pathlib import Path

from diptych_kvtiers.entry import KEY_BYTES

_OTHERS = 0o077


def read_fleet_key(path: Path) -> bytes:
    """The 32 bytes in `path`, such as `openssl rand -hex 32` writes.

    Raises:
        ValueError: it is no such file, or others than its owner may read it. Never holds the key.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text("ascii").strip()
        key = bytes.fromhex(text)
    except OSError as err:
        raise ValueError(f"{path}: cannot be read: {err.strerror}") from err
    except ValueError:
        raise ValueError(f"{path}: expected {2 * KEY_BYTES} hexadecimal digits") from None
    if mode & _OTHERS:
        raise ValueError(f"{path}: expected mode 0600, got {mode & 0o777:04o}")
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path}: expected {2 * KEY_BYTES} hexadecimal digits, got {len(text)}")
    return key
