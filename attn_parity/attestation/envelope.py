"""DSSE envelopes: a statement with a signature over its bytes, by a key file or by sigstore.

Source: DSSE v1.0.2, https://github.com/secure-systems-lab/dsse. Keys are Ed25519, or ECDSA with SHA-256, in PEM files,
read by `cryptography` (extra ``attest``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_bridge.printable import printable
from attn_bridge.whole_files import read

from ..results.changes import Data
from .statement import AttestationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

PAYLOAD = "application/vnd.in-toto+json"

MAX_KEY = 1 << 16
"""Bytes of the largest file of a key; one has some hundred."""

INSTALL_KEYS = "signatures by key need cryptography: pip install 'attn-bridge[attest]'"


class SignatureError(AttestationError):
    """A signature does not fit the key and the bytes."""


def signed(statement: Data, key: Path) -> Data:
    """Return the envelope of a statement, signed with a private key in a PEM file.

    Raises:
        AttestationError: the file is not such a key.
    """
    payload = json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
    private = _private_key(key)
    message = encoded(PAYLOAD, payload)
    signature = _signature(private, message)
    entry = {"keyid": _key_id(private.public_key()), "sig": base64.b64encode(signature).decode()}
    return {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD, "signatures": [entry]}


def opened(envelope: Data, key: Path) -> Data:
    """Return the statement of an envelope after checking its signature with a public key in a PEM file.

    Raises:
        AttestationError: the envelope or the key is malformed.
        SignatureError: the signature is not by this key over these bytes.
    """
    payload, signatures = _parts(envelope)
    public = _public_key(key)
    message = encoded(PAYLOAD, payload)
    if not any(_is_signed(public, message, signature) for signature in signatures):
        raise SignatureError(
            f"the signature is not by {key} over this statement: it was changed, or the key is another"
        )
    return _statement(payload)


def encoded(kind: str, payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding: the bytes that are signed."""
    return b"DSSEv1 %d %b %d %b" % (len(kind.encode()), kind.encode(), len(payload), payload)


def _signature(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(message)
    return key.sign(message, ec.ECDSA(hashes.SHA256()))


def _parts(envelope: Data) -> tuple[bytes, list[bytes]]:
    try:
        if envelope["payloadType"] != PAYLOAD:
            raise AttestationError(f"the envelope holds {printable(envelope['payloadType'])}, not {PAYLOAD}")
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(each["sig"], validate=True) for each in envelope["signatures"]]
    except (KeyError, TypeError, binascii.Error):
        raise AttestationError("it is not a DSSE envelope") from None
    return payload, signatures


def _statement(payload: bytes) -> Data:
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError):
        raise AttestationError("its statement is not JSON") from None
    if not isinstance(data, Mapping):
        raise AttestationError("its statement is not JSON of an object")
    return data


def _private_key(path: Path) -> ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey:
    content = _content(path)
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    except ImportError:
        raise AttestationError(INSTALL_KEYS) from None
    try:
        key = serialization.load_pem_private_key(content, None)
    except TypeError:
        raise AttestationError(f"--key {path} is encrypted; give a key without a password") from None
    except Exception:  # of several kinds, also from OpenSSL
        raise AttestationError(f"--key {path} is not a private key in PEM") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
        raise AttestationError(f"--key {path} must be an Ed25519 or ECDSA key")
    return key


def _public_key(path: Path) -> ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey:
    content = _content(path)
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    except ImportError:
        raise AttestationError(INSTALL_KEYS) from None
    try:
        key = serialization.load_pem_public_key(content)
    except Exception:  # of several kinds, also from OpenSSL
        raise AttestationError(f"--key {path} is not a public key in PEM") from None
    if not isinstance(key, ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey):
        raise AttestationError(f"--key {path} must be an Ed25519 or ECDSA key")
    return key


def _content(path: Path) -> bytes:
    try:
        return read(path, MAX_KEY)
    except OSError as error:
        raise AttestationError(f"--key {path} cannot be read: {error.strerror}") from None


def _is_signed(key: ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey, message: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, message)
        else:
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _key_id(key: ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives import serialization

    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()
