"""TLS over HTTP and gRPC: good and bad files, client certificates, and certificates that are renewed while serving."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tests.server.harness import Running, serving_fake, wait_until

from carousel.tls import Tls, TlsFiles, TlsUnusable

BODY = {"text_input": "a", "parameters": {"max_tokens": 2}}


@dataclass
class Issued:
    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates for 127.0.0.1, or for clients."""

    def __init__(self, name: str = "authority") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = self._sign(self.name, self.key, x509.BasicConstraints(True, None), None)

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        constraints: x509.BasicConstraints,
        names: x509.SubjectAlternativeName | None,
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(constraints, critical=True)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, passphrase: bytes | None = None) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "carousel")])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        kind = (
            serialization.BestAvailableEncryption(passphrase)
            if passphrase is not None
            else serialization.NoEncryption()
        )
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kind)
        return Issued(self._sign(subject, key, x509.BasicConstraints(False, None), names), pem)


AUTHORITY = Authority()


def write(folder: Path, issued: Issued, client_ca: bytes | None = None) -> TlsFiles:
    """As an operator would: each file is replaced whole."""
    found = []
    for name, content in (("tls.crt", issued.certificate), ("tls.key", issued.key), ("ca.crt", client_ca)):
        if content is None:
            continue
        (folder / f".{name}").write_bytes(content)
        (folder / f".{name}").replace(folder / name)
        found.append(folder / name)
    return TlsFiles(found[0], found[1], found[2] if client_ca is not None else None)


def flags(files: TlsFiles) -> dict[str, str]:
    return {
        "tls_certificate": str(files.certificate),
        "tls_key": str(files.key),
        "tls_client_ca": str(files.client_ca or ""),
    }


def trusting(authority: Authority, client: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return context


def serial(running: Running) -> int:
    pem = ssl.get_server_certificate(("127.0.0.1", running.settings.http_port), timeout=5)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def grpc_live(running: Running, authority: Authority, client: Issued | None = None) -> bool:
    credentials = grpc.ssl_channel_credentials(
        authority.pem, client.key if client else None, client.certificate if client else None
    )
    with grpc.secure_channel(running.grpc, credentials) as channel:
        return GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=5).live


def test_both_servers_speak_tls_and_take_a_renewed_certificate(tmp_path):
    first, second = AUTHORITY.issue(), AUTHORITY.issue()
    with serving_fake(**flags(write(tmp_path, first))) as running:
        with httpx.Client(base_url=running.url, verify=trusting(AUTHORITY), timeout=10) as kept:
            assert kept.post("/v2/models/fake/generate", json=BODY).json()["text_output"] == "w0 w1 "
            assert grpc_live(running, AUTHORITY)
            with pytest.raises(httpx.TransportError):
                httpx.get(running.url.replace("https", "http") + "/livez", timeout=5)
            with pytest.raises(httpx.ConnectError):
                httpx.get(running.url + "/livez", verify=trusting(Authority("stranger")), timeout=5)

            write(tmp_path, Issued(second.certificate, first.key))  # half of a renewal: does not belong together
            before = serial(running)
            write(tmp_path, second)
            renewed = x509.load_pem_x509_certificate(second.certificate).serial_number
            wait_until(lambda: serial(running) == renewed)
            assert before != renewed
            assert kept.get("/livez").status_code == 200  # the connection of before lives on
        assert grpc_live(running, AUTHORITY)


def test_clients_need_a_certificate_where_one_is_asked_for(tmp_path):
    clients = Authority("clients")
    (tmp_path / "client").mkdir()
    issued = clients.issue()
    client = write(tmp_path / "client", issued)
    with serving_fake(**flags(write(tmp_path, AUTHORITY.issue(), clients.pem))) as running:
        with httpx.Client(verify=trusting(AUTHORITY, client), timeout=10) as known:
            assert known.get(running.url + "/livez").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(running.url + "/livez", verify=trusting(AUTHORITY), timeout=5)
        assert grpc_live(running, AUTHORITY, issued)
        with pytest.raises(grpc.RpcError):
            grpc_live(running, AUTHORITY)


def test_a_renewal_that_is_no_good_changes_nothing(tmp_path, caplog):
    issued = AUTHORITY.issue()
    files = write(tmp_path, issued)
    tls = Tls(files)
    for content in (b"", b"-----BEGIN nothing", AUTHORITY.issue().key):
        files.key.write_bytes(content)
        assert not tls.refresh()
    files.key.unlink()
    assert not tls.refresh()
    assert caplog.text.count("those of before stay in use") == 4
    assert tls._pem == (issued.certificate, issued.key, None)
    write(tmp_path, AUTHORITY.issue())
    assert tls.refresh()
    assert not tls.refresh()


@pytest.mark.parametrize(
    ("spoil", "flag", "words"),
    [
        (lambda files: files.certificate.unlink(), "--tls-certificate", "No such file"),
        (lambda files: files.key.write_text("hello"), "--tls-key", "not a PEM file"),
        (lambda files: files.certificate.write_bytes(b"\x30\x82\x01"), "--tls-certificate", "not a PEM file"),
        (lambda files: files.key.write_bytes(AUTHORITY.issue().key), "--tls-key", "private key that belongs"),
        (lambda files: files.key.write_bytes(AUTHORITY.issue(b"secret").key), "--tls-key", "encrypted"),
        (lambda files: files.client_ca.write_text("-----BEGIN X"), "--tls-client-ca", "ca.crt"),
    ],
)
def test_bad_files_are_named_at_the_start(tmp_path, spoil, flag, words):
    files = write(tmp_path, AUTHORITY.issue(), AUTHORITY.pem)
    spoil(files)
    with pytest.raises(TlsUnusable) as caught:
        Tls(files)
    assert flag in str(caught.value)
    assert words in str(caught.value)


def test_a_server_with_bad_files_does_not_start(tmp_path, capfd):
    files = write(tmp_path, AUTHORITY.issue())
    files.key.write_text("hello")
    with serving_fake(ready=False, **flags(files)) as running:
        running.thread.join(10)
        assert running.codes == [1]
    assert "not a PEM file" in capfd.readouterr().err
