from diptych_contracts import streams, subjects
from diptych_contracts.ids import Incarnation, RequestId

MEMBER = Incarnation("gateway-0123456789ab")


def matches(pattern: str, subject: str) -> bool:
    wanted, parts = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return parts[: len(wanted) - 1] == wanted[:-1] and len(parts) >= len(wanted)
    same_length = len(wanted) == len(parts)
    return same_length and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True))


def stream_of(subject: str) -> list[str]:
    return [s.name for s in streams.STREAMS if any(matches(p, subject) for p in s.subjects)]


def test_each_stored_subject_belongs_to_exactly_one_stream() -> None:
    assert stream_of(subjects.request("batch", "org/model.v1")) == ["REQUESTS"]
    assert stream_of(subjects.token(MEMBER)) == ["TOKENS"]
    assert stream_of(subjects.event("member_lost")) == ["EVENTS"]
    assert stream_of(subjects.dead("REQUESTS")) == ["DEAD"]
    assert stream_of(subjects.dead_request(RequestId("r1"))) == ["DEAD"]
    given_up = subjects.undelivered(streams.SCHEDULERS.stream, streams.SCHEDULERS.name)
    assert stream_of(given_up) == ["UNDELIVERED"]


def test_nothing_else_is_stored_and_republished_tokens_do_not_loop() -> None:
    for subject in (
        subjects.live(MEMBER),
        subjects.job(MEMBER),
        subjects.kv(MEMBER, "reserve"),
        subjects.beat(MEMBER),
        subjects.load(MEMBER),
        subjects.cancel(MEMBER),
        subjects.attended(MEMBER),
        subjects.power(MEMBER),
    ):
        assert stream_of(subject) == []


def test_names_are_unique() -> None:
    for specs in (streams.STREAMS, streams.BUCKETS):
        assert len({spec.name for spec in specs}) == len(specs)
    names = {bucket.name for bucket in streams.OBJECT_BUCKETS}
    assert len(names) == len(streams.OBJECT_BUCKETS)
    assert not {b.name for b in streams.BUCKETS} & names


def test_what_recovery_reads_outlives_the_longest_request() -> None:
    for stream in (streams.REQUESTS, streams.TOKENS):
        assert stream.max_age_s >= streams.TOTAL_DEADLINE_S + streams.RESUME_WINDOW_S
    assert streams.REQUESTS.discard is streams.Discard.NEW, "an accepted request is never dropped"


def test_limits_fit_into_one_another() -> None:
    assert 0 < streams.MAX_MESSAGE_BYTES < streams.MAX_PAYLOAD_BYTES
    for spec in (*streams.STREAMS, *streams.BUCKETS):
        assert spec.max_bytes > streams.MAX_PAYLOAD_BYTES
    for stream in streams.STREAMS:
        assert 0 < stream.dedupe_s <= stream.max_age_s
    consumer = streams.SCHEDULERS
    assert consumer.stream in {stream.name for stream in streams.STREAMS}
    assert consumer.batch <= consumer.max_ack_pending
    assert consumer.ack_wait_s * consumer.max_deliver < streams.REQUESTS.max_age_s


def test_a_stored_response_lives_while_its_tokens_do_and_then_holds_them_itself() -> None:
    assert streams.TOKENS.max_age_s == streams.RUNNING_RESPONSE_TTL_S
    assert streams.ENDED_RESPONSE_TTL_S > streams.RUNNING_RESPONSE_TTL_S
    assert streams.MAX_RESPONSE_BYTES < streams.MAX_MESSAGE_BYTES


def test_what_is_kept_by_reference_outlives_what_names_it() -> None:
    ages = {bucket.name: bucket.max_age_s for bucket in streams.OBJECT_BUCKETS}
    assert ages[streams.PROMPTS] >= streams.REQUESTS.max_age_s
    longest_s = streams.RUNNING_RESPONSE_TTL_S + streams.ENDED_RESPONSE_TTL_S
    assert ages[streams.RESPONSE_PARTS] >= longest_s
    assert ages[streams.MODELS] == 0
