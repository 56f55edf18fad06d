"""Core NATS: publish, subscribe, request, serve."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from nats.aio.msg import Msg

from diptych_bus.answering import Answers
from diptych_bus.jetstream.connection import Connection, Listening
from diptych_bus.port import Delivery, Subscription
from diptych_bus.tracing import context_of, with_context
from diptych_contracts.wire import Message, decode, encode

_CONSUMER_REPLY = "$JS.ACK."
_REPUBLISHED = "live."


def delivery_of(msg: Msg, *, subject: str | None = None) -> Delivery:
    """`msg` as the port shows it; `subject` where it was stored under another."""
    return Delivery(subject or msg.subject, msg.data, msg.headers or {}, context_of(msg.headers))


def stamp_ms(msg: Msg) -> int:
    """When a consumer's message was stored, by the server's clock."""
    return round(msg.metadata.timestamp.timestamp() * 1000)


def sent_on(msg: Msg) -> bool:
    """Whether the server itself put this message into the stream or on the subject it comes from.

    Who may read anything from a stream can have the server send it to any subject, whatever it may
    publish itself: into buckets too. What was sent on names the stream that it comes from.
    """
    return "Nats-Stream" in (msg.headers or {})


def from_a_stream(msg: Msg) -> bool:
    """Whether nobody published this: it was `sent_on`, or delivered by a consumer."""
    return sent_on(msg) or msg.reply.startswith(_CONSUMER_REPLY)


class Serving:
    """A subscription whose requests are being answered."""

    def __init__(self, listening: Listening, answers: Answers) -> None:
        self._listening = listening
        self._answers = answers

    async def close(self) -> None:
        """Take no more requests and cancel those in work."""
        await self._listening.close()
        await self._answers.close()


class JetStreamMessaging:
    """See `port.Messaging`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def publish(self, subject: str, message: Message) -> None:
        """Send and forget; dropped while the server is away."""
        await self._connection.publish(subject, encode(message), headers=with_context())

    async def subscribe(self, subject: str, handler: Callable[[Delivery], None]) -> Subscription:
        """Call `handler` for each message on `subject`."""
        republished = subject.startswith(_REPUBLISHED)

        def take(msg: Msg) -> None:
            if republished or not from_a_stream(msg):
                handler(delivery_of(msg))

        return await self._connection.listen_for_others(subject, take)

    async def request(self, subject: str, message: Message, reply: Any, *, timeout_s: float) -> Any:
        """Send `message` and give the answer as type `reply`."""
        msg = await self._connection.request(
            subject, encode(message), headers=with_context(), timeout_s=timeout_s
        )
        return decode(msg.data, reply)

    async def serve(
        self, subject: str, answerer: Callable[[Delivery], Awaitable[Message]]
    ) -> Subscription:
        """Answer requests on `subject`, each in a task of its own."""
        answers = Answers(answerer, self._connection.lifetime)

        def take(msg: Msg) -> None:
            if msg.reply and not from_a_stream(msg):
                answers.take(delivery_of(msg), partial(self._connection.publish, msg.reply))

        return Serving(await self._connection.listen_for_others(subject, take), answers)
