"""Streams and buckets as `contracts.streams` declares them.

Safe when five services start at once: creating what exists with the same configuration succeeds,
and what exists with another is left alone.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from diptych_bus.jetstream.answers import NAME_IN_USE, ApiError, api
from diptych_bus.jetstream.connection import Connection
from diptych_bus.port import Backlog
from diptych_bus.stream_names import bucket_stream, object_stream
from diptych_contracts.errors import Transient
from diptych_contracts.streams import BucketSpec, ConsumerSpec, ObjectBucketSpec, StreamSpec

NS = 1_000_000_000
DECLARE_S = 5.0
"""The least that one stream may take: a process that still connects has as long as it waits."""
BUCKET_DEDUPE_S = 60.0
_PAUSE_S = 0.2


def stream_config(spec: StreamSpec) -> dict[str, Any]:
    """`spec` as the server wants it."""
    config: dict[str, Any] = {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "limits",
        "storage": "file",
        "max_age": int(spec.max_age_s * NS),
        "max_bytes": spec.max_bytes,
        "discard": spec.discard.value,
        "duplicate_window": int(spec.dedupe_s * NS),
        "allow_direct": True,
    }
    if spec.republish is not None:
        source, destination = spec.republish
        config["republish"] = {"src": source, "dest": destination}
    return config


def bucket_config(spec: BucketSpec) -> dict[str, Any]:
    """A bucket that `nats kv` understands, with TTLs per key and direct reads."""
    return {
        "name": bucket_stream(spec.name),
        "subjects": [f"$KV.{spec.name}.>"],
        "storage": "file",
        "max_msgs_per_subject": spec.history,
        "max_bytes": spec.max_bytes,
        "discard": "new",
        "duplicate_window": int(BUCKET_DEDUPE_S * NS),
        "allow_direct": True,
        "allow_msg_ttl": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
    }


def object_config(spec: ObjectBucketSpec) -> dict[str, Any]:
    """An object bucket that `nats object` understands."""
    return {
        "name": object_stream(spec.name),
        "subjects": [f"$O.{spec.name}.C.>", f"$O.{spec.name}.M.>"],
        "storage": "file",
        "max_bytes": spec.max_bytes,
        "max_age": int(spec.max_age_s * NS),
        "discard": "new",
        "allow_direct": True,
        "allow_rollup_hdrs": True,
    }


async def declare(
    connection: Connection,
    streams: Iterable[StreamSpec],
    buckets: Iterable[BucketSpec],
    object_buckets: Iterable[ObjectBucketSpec],
    *,
    replicas: int = 1,
    until_s: float = 0.0,
) -> None:
    """Create what is missing; what fails for now is tried again until `until_s` (loop time).

    Raises:
        Transient: JetStream is not ready.
        Permanent: the server refuses a stream (no storage left, say).
    """
    configs = [stream_config(spec) for spec in streams]
    configs += [bucket_config(spec) for spec in buckets]
    configs += [object_config(spec) for spec in object_buckets]
    for config in configs:
        config["num_replicas"] = replicas
        while not await _created(connection, config, until_s=until_s):  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)


async def _created(connection: Connection, config: dict[str, Any], *, until_s: float) -> bool:
    """Whether the stream is there; False if it is worth another try."""
    name = config["name"]
    within_s = max(DECLARE_S, until_s - asyncio.get_running_loop().time())
    try:
        await api(connection, f"STREAM.CREATE.{name}", config, timeout_s=within_s)
    except ApiError as err:
        if err.err_code == NAME_IN_USE:
            return True
        judged = err.judged(f"cannot create stream {name}")
        # As when the files of one that was just deleted are still being removed.
        if type(judged) is Transient and asyncio.get_running_loop().time() < until_s:
            return False
        raise judged from err
    return True


async def backlog(connection: Connection, spec: ConsumerSpec, *, timeout_s: float) -> Backlog:
    """How far the consumer `spec` has come; see the port."""
    where = f"{spec.stream}.{spec.name}"
    try:
        stream = await api(connection, f"STREAM.INFO.{spec.stream}", {}, timeout_s=timeout_s)
        consumer = await api(connection, f"CONSUMER.INFO.{where}", {}, timeout_s=timeout_s)
    except ApiError as err:
        raise Transient(f"consumer {where}: {err.description}") from err
    newest_seq = int(stream["state"]["last_seq"])
    if consumer["num_pending"] == 0 and consumer["num_ack_pending"] == 0:
        return Backlog(newest_seq, max(newest_seq, int(consumer["delivered"]["stream_seq"])))
    return Backlog(newest_seq, int(consumer["ack_floor"]["stream_seq"]))


async def declare_consumer(connection: Connection, spec: ConsumerSpec, *, timeout_s: float) -> None:
    """Create the durable pull consumer unless it exists."""
    where = f"{spec.stream}.{spec.name}"
    try:
        await api(connection, f"CONSUMER.INFO.{where}", {}, timeout_s=timeout_s)
        return
    except ApiError as err:
        if err.code != 404:
            raise err.judged(f"consumer {where}") from err
    config = {
        "durable_name": spec.name,
        "name": spec.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(spec.ack_wait_s * NS),
        "max_deliver": spec.max_deliver,
        "max_ack_pending": spec.max_ack_pending,
    }
    body = {"stream_name": spec.stream, "config": config}
    try:
        await api(connection, f"CONSUMER.CREATE.{where}", body, timeout_s=timeout_s)
    except ApiError as err:
        raise err.judged(f"cannot create consumer {where}") from err
