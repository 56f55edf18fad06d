"""Which certificate each writer was announced with, and the TLS context that trusts just those."""

import ssl
import threading
from collections import OrderedDict

from diptych_contracts.errors import Incompatible, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import RefusalReason
from diptych_kvlink.link_identity import LinkIdentity, check_certificate

_REMEMBERED = 512
"""Twice the connections there may be; who is forgotten is announced again with its next ticket."""


class Pins:
    """Safe to use from several threads."""

    def __init__(self, identity: LinkIdentity) -> None:
        self._identity = identity
        self._lock = threading.Lock()
        self._pinned: OrderedDict[Incarnation, bytes] = OrderedDict()
        self._context: ssl.SSLContext | None = None

    def pin(self, writer: Incarnation, certificate: bytes) -> None:
        """From now on `writer` is who shows `certificate`.

        A process has one for its life, so the first to be announced stays.

        Raises:
            Refused: there is none, it is none, or `writer` was announced with another.
        """
        with self._lock:
            known = self._pinned.get(writer)
            if known is None:
                self._admit(writer, certificate)
            elif known != certificate:
                detail = f"{writer} was announced with another certificate"
                raise Refused(RefusalReason.UNSUPPORTED, detail)
            self._pinned.move_to_end(writer)

    def is_shown_by(self, writer: Incarnation, certificate: bytes) -> bool:
        """Whether `certificate` is the one `writer` was announced with."""
        with self._lock:
            return bool(certificate) and self._pinned.get(writer) == certificate

    def context(self) -> ssl.SSLContext:
        """For the next connection. Made anew after each new writer, while nobody waits for it."""
        with self._lock:
            if self._context is not None:
                return self._context
            trusted = list(self._pinned.values())
        context = self._identity.answering(trusted)
        with self._lock:
            if trusted == list(self._pinned.values()):
                self._context = context
        return context

    def _admit(self, writer: Incarnation, certificate: bytes) -> None:
        if not certificate:
            detail = f"KV crosses tcp with TLS only, and {writer} announced no certificate"
            raise Refused(RefusalReason.UNSUPPORTED, detail)
        try:
            check_certificate(certificate)
        except Incompatible as err:
            raise Refused(RefusalReason.UNSUPPORTED, f"{writer}: {err}") from err
        self._pinned[writer] = certificate
        if len(self._pinned) > _REMEMBERED:
            self._pinned.popitem(last=False)
        self._context = None
