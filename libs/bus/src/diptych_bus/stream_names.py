"""What JetStream calls things: its API, what stands behind buckets, its own announcements."""

API = "$JS.API"
DELETED = "$JS.EVENT.ADVISORY.STREAM.DELETED.*"


def bucket_stream(bucket: str) -> str:
    """The stream behind a key-value bucket."""
    return f"KV_{bucket}"


def object_stream(bucket: str) -> str:
    """The stream behind an object bucket."""
    return f"OBJ_{bucket}"
