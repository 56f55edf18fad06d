"""The table: what each role needs, and so may. `docs/security.md` and the server follow from it.

Nobody hears another's inbox. A process publishes under its own name only, except to whom its work
is addressed. Whoever reads a stream reads all of it: the server cannot tell messages apart there.
"""

from collections.abc import Mapping

from diptych_bus.permissions.rights import (
    ANY,
    CHANGE,
    KEEP,
    NAME,
    WATCH,
    BucketUse,
    ObjectsUse,
    Rights,
    StreamUse,
)
from diptych_contracts import streams, subjects
from diptych_contracts.ids import Incarnation
from diptych_identity.roles import Role

_ME = Incarnation(NAME)
_ANYBODY = Incarnation(ANY)
_GOVERNOR_KEY = "governor"

_WORKER = Rights(
    publishes=(
        subjects.beat(_ME),
        subjects.load(_ME),
        subjects.blocks(_ME),
        subjects.token(_ANYBODY),
        subjects.current(_ME),
        subjects.event("member_drained"),
    ),
    hears=(subjects.power(_ME), subjects.embed(_ME, "cancel"), subjects.BEATS),
    answers=(
        subjects.job(_ME),
        subjects.cancel(_ME),
        subjects.control(_ME),
        subjects.embed(_ME, "job"),
        subjects.kv(_ME, "reserve"),
        subjects.kv(_ME, "release"),
    ),
    streams={streams.TOKENS.name: StreamUse(), streams.EVENTS.name: StreamUse()},
    buckets={streams.WORKERS.name: BucketUse(reads=(ANY,), writes=(NAME,), lists=True)},
    objects={
        streams.MODELS: ObjectsUse(reads=True, writes=True),
        streams.PROMPTS: ObjectsUse(reads=True),
        streams.KV_BLOCKS: ObjectsUse(reads=True, writes=True),
    },
)

_PREFILL_WORKER = Rights(
    publishes=(
        *_WORKER.publishes,
        subjects.job(_ANYBODY),
        subjects.kv(_ANYBODY, "reserve"),
        subjects.kv(_ANYBODY, "release"),
    ),
    hears=_WORKER.hears,
    answers=_WORKER.answers,
    streams=_WORKER.streams,
    buckets=_WORKER.buckets,
    objects=_WORKER.objects,
)

_GATEWAY = Rights(
    publishes=(
        subjects.beat(_ME),
        subjects.request_any(),
        subjects.token(_ANYBODY),
        subjects.attended(_ANYBODY),
        subjects.embed(_ANYBODY, "job"),
        subjects.embed(_ANYBODY, "cancel"),
        subjects.event("request_ended"),
        subjects.event("member_drained"),
        subjects.AUDITS,
    ),
    hears=(subjects.LIVES, subjects.LOADS, subjects.QUEUES, subjects.attended(_ME)),
    streams={
        streams.REQUESTS.name: StreamUse(),
        streams.TOKENS.name: StreamUse(reads=True),
        streams.EVENTS.name: StreamUse(reads=True),
        streams.AUDIT.name: StreamUse(reads=True),
    },
    buckets={
        streams.REQUEST_RECORDS.name: CHANGE,
        streams.WORKERS.name: WATCH,
        streams.KEYS.name: WATCH,
        streams.ALLOWANCES.name: CHANGE,
        streams.USAGE.name: KEEP,
        streams.IDEMPOTENCY.name: CHANGE,
        streams.RESPONSES.name: CHANGE,
        streams.FILES.name: KEEP,
        streams.BATCHES.name: KEEP,
        streams.BATCH_RESULTS.name: CHANGE,
    },
    objects={
        streams.MODELS: ObjectsUse(reads=True),
        streams.PROMPTS: ObjectsUse(reads=True, writes=True),
        streams.RESPONSE_PARTS: ObjectsUse(reads=True, writes=True),
        streams.FILE_PARTS: ObjectsUse(reads=True, writes=True),
    },
)

_SCHEDULER = Rights(
    publishes=(
        subjects.beat(_ME),
        subjects.queue(_ME),
        subjects.job(_ANYBODY),
        subjects.cancel(_ANYBODY),
        subjects.control(_ANYBODY),
        subjects.token(_ANYBODY),
        subjects.event(ANY),
        subjects.DEADS,
    ),
    hears=(
        subjects.BEATS,
        subjects.LOADS,
        subjects.BLOCKS,
        subjects.ATTENDED,
        subjects.LIVES,
    ),
    answers=(subjects.CURRENT,),
    streams={
        streams.REQUESTS.name: StreamUse(reads=True, erases=True, pulls=streams.SCHEDULERS.name),
        streams.TOKENS.name: StreamUse(reads=True),
        streams.UNDELIVERED.name: StreamUse(pulls=streams.UNDELIVERED_SCHEDULERS.name),
        streams.EVENTS.name: StreamUse(),
        streams.DEAD.name: StreamUse(),
    },
    buckets={streams.REQUEST_RECORDS.name: KEEP, streams.WORKERS.name: WATCH},
    objects={
        streams.PROMPTS: ObjectsUse(reads=True, writes=True),
        streams.DEAD_PROMPTS: ObjectsUse(reads=True, writes=True),
    },
)

_POWER_GOVERNOR = Rights(
    publishes=(
        subjects.beat(_ME),
        subjects.power(_ANYBODY),
        subjects.event("member_drained"),
    ),
    hears=(subjects.LOADS,),
    streams={streams.EVENTS.name: StreamUse()},
    buckets={
        streams.LEASES.name: BucketUse(reads=(_GOVERNOR_KEY,), writes=(_GOVERNOR_KEY,)),
        streams.WORKERS.name: WATCH,
    },
)

_SUPERVISOR = Rights(
    publishes=(subjects.beat(_ME),),
    hears=(subjects.BEATS,),
    answers=(subjects.control(_ME),),
    creates=True,
)

_OBSERVER = Rights(
    hears=(
        subjects.BEATS,
        subjects.LOADS,
        subjects.QUEUES,
        subjects.BLOCKS,
        subjects.ATTENDED,
        subjects.power(_ANYBODY),
        subjects.event(ANY),
    ),
    buckets={streams.WORKERS.name: WATCH},
)

_OPERATOR = Rights(
    publishes=(
        subjects.control(_ANYBODY),
        subjects.request_any(),
        subjects.DEADS,
        subjects.AUDITS,
    ),
    hears=subjects.EVERYTHING,
    streams={
        streams.REQUESTS.name: StreamUse(reads=True, erases=True),
        streams.TOKENS.name: StreamUse(reads=True, erases=True),
        streams.DEAD.name: StreamUse(reads=True, erases=True),
        streams.EVENTS.name: StreamUse(reads=True),
        streams.AUDIT.name: StreamUse(reads=True),
    },
    buckets={
        streams.WORKERS.name: WATCH,
        streams.REQUEST_RECORDS.name: KEEP,
        streams.RESPONSES.name: KEEP,
        streams.IDEMPOTENCY.name: KEEP,
        streams.FILES.name: KEEP,
        streams.BATCHES.name: KEEP,
        streams.BATCH_RESULTS.name: KEEP,
        streams.KEYS.name: KEEP,
        streams.ALLOWANCES.name: KEEP,
        streams.USAGE.name: KEEP,
        streams.CONFIG.name: KEEP,
    },
    objects={
        streams.MODELS: ObjectsUse(reads=True),
        streams.PROMPTS: ObjectsUse(reads=True, writes=True),
        streams.DEAD_PROMPTS: ObjectsUse(reads=True, writes=True),
        streams.RESPONSE_PARTS: ObjectsUse(reads=True, writes=True),
        streams.FILE_PARTS: ObjectsUse(reads=True, writes=True),
        streams.KV_BLOCKS: ObjectsUse(reads=True, writes=True),
    },
)
"""A purge looks everywhere and erases anything of a tenant's."""

RIGHTS: Mapping[Role, Rights] = {
    Role.GATEWAY: _GATEWAY,
    Role.SCHEDULER: _SCHEDULER,
    Role.PREFILL_WORKER: _PREFILL_WORKER,
    Role.DECODE_WORKER: _WORKER,
    Role.POWER_GOVERNOR: _POWER_GOVERNOR,
    Role.SUPERVISOR: _SUPERVISOR,
    Role.OPERATOR: _OPERATOR,
    Role.OBSERVER: _OBSERVER,
}
