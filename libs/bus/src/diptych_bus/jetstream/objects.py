"""Object buckets, in the layout of `nats object`: chunks of 128 KiB and a description."""

import asyncio
import base64
import hashlib
import json
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from diptych_bus.jetstream import direct
from diptych_bus.jetstream.answers import ApiError, api, stored
from diptych_bus.jetstream.connection import Connection
from diptych_bus.stream_names import object_stream
from diptych_contracts.errors import Transient

CHUNK_BYTES = 128 * 1024
CALL_S = 5.0
TRIES = 3
"""A reader may lose its chunks to a writer that replaces them."""


async def _digest(data: bytes) -> str:
    """12 MB take 12 to 40 ms: the event loop does not wait for that."""
    if len(data) <= CHUNK_BYTES:
        return _sha256(data)
    return await asyncio.to_thread(_sha256, data)


def _sha256(data: bytes) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()


def _description_subject(bucket: str, name: str) -> str:
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _chunk_subject(bucket: str, object_id: str) -> str:
    return f"$O.{bucket}.C.{object_id}"


async def put_object(connection: Connection, bucket: str, name: str, data: bytes) -> None:
    """Store `data` under `name`, chunks first, then drop the chunks it replaces."""
    old = await _description(connection, bucket, name)
    object_id = uuid4().hex
    for start in range(0, len(data), CHUNK_BYTES):
        await stored(
            connection,
            _chunk_subject(bucket, object_id),
            data[start : start + CHUNK_BYTES],
            headers={"Nats-Msg-Id": f"{object_id}.{start}"},
            timeout_s=CALL_S,
        )
    description = {
        "name": name,
        "bucket": bucket,
        "nuid": object_id,
        "size": len(data),
        "chunks": -(-len(data) // CHUNK_BYTES),
        "digest": await _digest(data),
        "mtime": datetime.now(UTC).isoformat(),
        "options": {"max_chunk_size": CHUNK_BYTES},
    }
    await stored(
        connection,
        _description_subject(bucket, name),
        json.dumps(description).encode(),
        headers={"Nats-Rollup": "sub", "Nats-Msg-Id": object_id},
        timeout_s=CALL_S,
    )
    if old is not None:
        await _purge(connection, bucket, _chunk_subject(bucket, old["nuid"]))


async def get_object(connection: Connection, bucket: str, name: str) -> bytes | None:
    """The newest value under `name`.

    Raises:
        Transient: it does not have the length and digest its description names.
    """
    for attempt in range(TRIES):
        description = await _description(connection, bucket, name)
        if description is None or description.get("deleted"):
            return None
        data = await _chunks(connection, bucket, description["nuid"])
        whole = len(data) == description["size"]
        if whole and await _digest(data) == description["digest"]:
            return data
        await asyncio.sleep(0.05 * (attempt + 1))
    raise Transient(f"object {bucket}/{name} is incomplete or altered")


async def delete_object(connection: Connection, bucket: str, name: str) -> None:
    """Remove the description of `name` and its chunks: unlike `nats object rm`, without a trace."""
    description = await _description(connection, bucket, name)
    if description is not None:
        await _purge(connection, bucket, _description_subject(bucket, name))
        await _purge(connection, bucket, _chunk_subject(bucket, description["nuid"]))


async def object_names(connection: Connection, bucket: str) -> list[str]:
    """The names of all values, the oldest first."""
    names: list[str] = []
    messages = direct.all_on(connection, object_stream(bucket), f"$O.{bucket}.M.*", after_seq=0)
    async with aclosing(messages):
        async for msg in messages:
            description = json.loads(msg.data)
            if not description.get("deleted"):
                names.append(description["name"])
    return names


async def _description(connection: Connection, bucket: str, name: str) -> dict[str, Any] | None:
    msg = await direct.last_on(
        connection, object_stream(bucket), _description_subject(bucket, name)
    )
    return json.loads(msg.data) if msg is not None else None


async def _chunks(connection: Connection, bucket: str, object_id: str) -> bytes:
    data = bytearray()
    messages = direct.all_on(
        connection, object_stream(bucket), _chunk_subject(bucket, object_id), after_seq=0
    )
    async with aclosing(messages):
        async for msg in messages:
            data += msg.data
    return bytes(data)


async def _purge(connection: Connection, bucket: str, subject: str) -> None:
    body = {"filter": subject}
    try:
        await api(connection, f"STREAM.PURGE.{object_stream(bucket)}", body, timeout_s=CALL_S)
    except ApiError as err:
        raise err.judged(f"cannot drop {subject} of {bucket}") from err
