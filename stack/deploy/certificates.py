"""A private authority and certificates signed by it, for the services of one stack. The only file that imports
cryptography.

Keys are ECDSA on P-256: small, quick, and read by every program of the stack. Times are UTC and come in as
arguments."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
LEAF_DAYS = 397  # the longest that browsers took of public authorities when this was written
RENEW_DAYS = 60  # a stack that is started anew once in two months never shows an expired one
_NAME = "vllm-watch private authority"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, as PEM texts."""

    certificate: str
    key: str = ""

    @property
    def x509(self) -> x509.Certificate:
        """Raises ValueError where the text is no certificate."""
        return x509.load_pem_x509_certificate(self.certificate.encode())

    @property
    def private(self) -> ec.EllipticCurvePrivateKey:
        """Raises ValueError where the text is no key of ours."""
        key = serialization.load_pem_private_key(self.key.encode(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the key is not one of an elliptic curve")
        return key


def authority(now: datetime) -> Pair:
    """A new authority, which may sign services and nothing below them. Two of them differ in name, so that a check
    cannot mix them up."""
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{_NAME} {x509.random_serial_number() % 16**8:08x}")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(named, named, key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(
        usage, critical=True
    )
    return _signed(builder, key, key)


def leaf(signer: Pair, names: Sequence[str], now: datetime) -> Pair:
    """A certificate for these names and addresses, for servers and for clients, signed by `signer`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = _builder(subject, signer.x509.subject, key.public_key(), now, LEAF_DAYS)
    builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True).add_extension(
        purposes, critical=False
    )
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.private.public_key()), critical=False
    )
    return _signed(builder, key, signer.private)


def is_of(certificate: str, signer: Pair) -> bool:
    """Return whether this authority signed the certificate."""
    try:
        Pair(certificate).x509.verify_directly_issued_by(signer.x509)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def is_ours(certificate: str) -> bool:
    """Return whether an authority made here signed it, this one or an earlier one; False for an operator's own and for
    what is no certificate."""
    try:
        return any(
            str(one.value).startswith(_NAME)
            for one in Pair(certificate).x509.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
        )
    except ValueError:
        return False


def fits(certificate: str, key: str) -> bool:
    """Return whether the private key, of any kind, is the certificate's. Raises ValueError where the key cannot be read
    as it is."""
    try:
        private = serialization.load_pem_private_key(key.encode(), None)
    except (TypeError, UnsupportedAlgorithm) as error:  # TypeError: it wants a password
        raise ValueError(str(error)) from error
    written = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return private.public_key().public_bytes(*written) == Pair(certificate).x509.public_key().public_bytes(*written)


def names_of(certificate: str) -> frozenset[str]:
    """The names and addresses that it stands for."""
    found = Pair(certificate).x509.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return frozenset(str(one.value) for one in found)


def days_left(certificate: str, now: datetime) -> float:
    """Until it expires; negative once it has."""
    return (Pair(certificate).x509.not_valid_after_utc - now) / timedelta(days=1)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    """Valid an hour back, for hosts whose clocks differ."""
    started = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
    )
    started = started.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return started.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=days))


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey) -> Pair:
    certificate = builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    bare = serialization.NoEncryption()
    return Pair(
        certificate, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, bare).decode()
    )
