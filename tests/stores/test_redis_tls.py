"""Redis over TLS: the certificate is checked, sync and async."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from semel import AsyncRedisStore, ConfigurationError, RedisStore, StoreUnavailable
from semel.core.ops import Claimed, Complete, Existing
from tests.servers import RedisServer
from tests.servers.base import LOOPBACK, free_port
from tests.stores.test_redis_server import claim, run, told


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a certificate for the loopback address, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "semel tests")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@pytest.fixture
def address(redis: RedisServer, certificate: Path) -> Iterator[str]:
    """Where a server listens with TLS; ``redis`` is asked for so that a machine without it skips."""
    port = free_port()
    files = ("--tls-cert-file", f"{certificate}/cert.pem", "--tls-key-file", f"{certificate}/key.pem")
    with RedisServer("--tls-port", str(port), *files, "--tls-auth-clients", "no"):
        yield f"rediss://{LOOPBACK}:{port}/0"


def test_a_checked_line_carries_records(address: str, certificate: Path) -> None:
    url = f"{address}?ssl_ca_certs={certificate}/cert.pem"
    op = claim()
    with contextlib.closing(RedisStore(url)) as store:
        won = store.execute(op)
        assert isinstance(won, Claimed)
        store.wait(op.id, 0.05)
        assert store.execute(Complete(op.id, won.token, b"answer", 60.0)) is True

    async def main() -> None:
        aio = AsyncRedisStore(url)
        shown = await aio.execute(claim(op.id, 2))
        assert isinstance(shown, Existing)
        assert shown.record.snapshot == b"answer"
        await aio.wait(op.id, 0.05)
        await aio.close()

    run(main)


def test_a_certificate_that_nobody_vouches_for_is_refused_unless_the_url_says_otherwise(address: str) -> None:
    refusing = RedisStore(address, retry_for=0)
    with contextlib.closing(refusing), pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        refusing.execute(claim())
    with contextlib.closing(RedisStore(f"{address}?ssl_cert_reqs=none", retry_for=0)) as store:
        assert isinstance(store.execute(claim()), Claimed)

    async def main() -> None:
        aio = AsyncRedisStore(address, retry_for=0)
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            await aio.execute(claim())
        await aio.close()
        aio = AsyncRedisStore(f"{address}?ssl_cert_reqs=none", retry_for=0)
        assert isinstance(await told(aio, claim()), Claimed)
        await aio.close()

    run(main)


def test_a_file_that_is_not_there_is_a_mistake_of_the_set_up() -> None:
    for kind in (RedisStore, AsyncRedisStore):
        with pytest.raises(ConfigurationError, match="ssl_ca_certs does not exist"):
            kind("rediss://localhost?ssl_ca_certs=/nowhere.pem")


def test_a_file_that_is_no_certificate_is_one_too(address: str, certificate: Path) -> None:
    url = f"{address}?ssl_ca_certs={certificate}/key.pem"
    refusing = RedisStore(url, retry_for=0)
    with contextlib.closing(refusing), pytest.raises((ConfigurationError, StoreUnavailable)):
        refusing.execute(claim())

    async def main() -> None:
        aio = AsyncRedisStore(url, retry_for=0)
        with pytest.raises((ConfigurationError, StoreUnavailable)):
            await aio.execute(claim())
        await aio.close()

    run(main)
