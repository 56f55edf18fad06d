"""Who may say what in a request's journal.

Everybody who publishes to the bus could write into a journal; what counts there is said with a
*voice*, 16 bytes made of the request's secret. The secret is drawn by its gateway and stands in the
stored request and its record, which no worker can read. A job carries one voice: its attempt's. So
a worker, or a thief with a worker's credential, can speak for the attempts it was given, and
neither for other requests nor for an attempt that replaced it.

- An attempt's voice says tokens, `Started`, `AttemptFailed` and ends, of that attempt.
- The owner's voice, which gateways and schedulers know, says fences and ends.

A request without a secret comes from a gateway of an older version: all voices count.
"""

import hmac

VOICE_BYTES = 16
SECRET_BYTES = 16
KEY_BYTES = 32


def secret_of(key: bytes, request_id: str) -> bytes:
    """A request's secret, of a gateway that draws a random `key` when it starts."""
    return _of(key, f"secret:{request_id}")


def attempt_voice(secret: bytes, attempt: int) -> bytes:
    """The voice of the workers of an attempt."""
    return _of(secret, f"attempt:{attempt}")


def owner_voice(secret: bytes) -> bytes:
    """The voice of a request's owner and its gateways."""
    return _of(secret, "owner")


same = hmac.compare_digest
"""Whether two voices are one, in a time that does not tell where they differ."""


def _of(key: bytes, what: str) -> bytes:
    """Nothing of an empty key: who has no secret has no voice."""
    return hmac.digest(key, what.encode(), "sha256")[:VOICE_BYTES] if key else b""
