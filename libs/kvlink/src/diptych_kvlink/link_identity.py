"""Who a process is on its KV links: a key and a certificate of its own, for this life only.

Each end makes a key and a self-signed certificate when it starts. The certificate travels over the
bus, which knows who speaks: the reader's in its endpoint, the writer's in its `Reserve`. Each side
then trusts exactly that one certificate: nothing signs it, nothing has to be rotated, and who does
not know the key is nobody. So the dates in it mean nothing and are as wide as dates can be: clocks
of hosts differ, and the process's death ends it.
"""

import contextlib
import os
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from diptych_contracts.errors import Incompatible

MAX_CERTIFICATE_BYTES = 2048
"""Ours have some 300."""
_BEGIN, _END = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


class LinkIdentity:
    """A fresh key (P-256) and its certificate; 1 ms to make."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key()
        # A name of its own: certificates to trust are looked up by name, then compared.
        digest = x509.SubjectKeyIdentifier.from_public_key(public).digest
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"diptych-kv-{digest.hex()}")])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_END)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.certificate = made.public_bytes(serialization.Encoding.DER)
        self._pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ) + made.public_bytes(serialization.Encoding.PEM)

    def calling(self, reader: bytes) -> ssl.SSLContext:
        """To call the reader with this certificate, and nobody else. Raises `Incompatible`."""
        check_certificate(reader)
        return self._context(ssl.PROTOCOL_TLS_CLIENT, [reader])

    def answering(self, writers: Sequence[bytes]) -> ssl.SSLContext:
        """To be called by writers with one of these certificates."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER, writers)
        context.num_tickets = 0  # Nothing is resumed; and so nothing comes between two exchanges.
        return context

    def _context(self, side: int, trusted: Sequence[bytes]) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # The certificate itself is expected, whoever it names.
        context.verify_mode = ssl.CERT_REQUIRED
        for certificate in trusted:
            with contextlib.suppress(ssl.SSLError):  # Then it is not trusted, and no other suffers.
                context.load_verify_locations(cadata=certificate)
        with _only_for_us(self._pem) as path:
            context.load_cert_chain(path)
        return context


def check_certificate(certificate: bytes) -> None:
    """Raise `Incompatible` unless it is one well-formed X.509 certificate (DER); 0.3 ms."""
    if not 0 < len(certificate) <= MAX_CERTIFICATE_BYTES:
        raise Incompatible(
            f"expected a certificate of at most {MAX_CERTIFICATE_BYTES} bytes, "
            f"got {len(certificate)}"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError as err:
        raise Incompatible(f"expected a certificate (X.509, DER): {err!s:.200}") from err
    if context.cert_store_stats()["x509"] != 1:
        raise Incompatible("expected one certificate (X.509, DER), got more")


@contextlib.contextmanager
def _only_for_us(pem: bytes) -> Iterator[str]:
    """A path to `pem` for the one function that reads keys from files only."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("diptych-kv", os.MFD_CLOEXEC)
        path = f"/proc/self/fd/{fd}"
    else:
        fd, path = tempfile.mkstemp(prefix="diptych-kv-")  # 0600
    try:
        os.write(fd, pem)
        yield path
    finally:
        if not path.startswith("/proc/"):
            os.unlink(path)
        os.close(fd)
