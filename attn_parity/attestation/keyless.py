"""Signatures without a key file, by sigstore: the identity of a CI job or a person signs, and a public log has it.

Needs a network and the extra ``sigstore``. An attestation is then a sigstore bundle, which holds the DSSE envelope.
"""

from __future__ import annotations

import importlib
import json
from types import ModuleType

from attn_bridge.printable import printable

from ..results.changes import Data
from .envelope import PAYLOAD, SignatureError
from .statement import AttestationError

INSTALL = "without --key, sigstore is needed: pip install 'attn-bridge[sigstore]', or give --key FILE"


def signed(statement: Data) -> Data:
    """Return a statement as a sigstore bundle, signed with the identity of the environment, such as a CI job's.

    Raises:
        AttestationError: sigstore is not installed, or there is no identity or network.
    """
    sign, dsse, oidc, models = map(_load, ("sign", "dsse", "oidc", "models"))
    try:
        token = oidc.detect_credential()
        if token is None:
            raise AttestationError("sigstore found no identity here: run in a CI job with one, or give --key FILE")
        context = sign.SigningContext.from_trust_config(models.ClientTrustConfig.production())
        with context.signer(oidc.IdentityToken(token)) as signer:
            bundle = signer.sign_dsse(dsse.Statement(json.dumps(statement, sort_keys=True).encode()))
        return dict(json.loads(bundle.to_json()))
    except AttestationError:
        raise
    except Exception as error:  # of the network and of several packages
        raise AttestationError(f"sigstore could not sign: {printable(error, 300)}; or give --key FILE") from None


def opened(bundle: Data, identity: str, issuer: str | None) -> Data:
    """Return the statement of a sigstore bundle after checking that an identity signed it.

    Args:
        bundle: the data of the bundle.
        identity: the signer: an e-mail address, or the URL of a workflow.
        issuer: who vouches for the identity, an OIDC issuer; None for any.

    Raises:
        AttestationError: sigstore is not installed, or there is no network.
        SignatureError: the signature is not by that identity.
    """
    models, verify = _load("models"), _load("verify")
    policy = _load("verify.policy").Identity(identity=identity, issuer=issuer)
    try:
        verifier = verify.Verifier.production()
    except Exception as error:  # of the network and of several packages
        raise AttestationError(f"sigstore could not read its roots of trust: {printable(error, 300)}") from None
    try:
        kind, payload = verifier.verify_dsse(models.Bundle.from_json(json.dumps(bundle)), policy)
        statement = json.loads(payload)
    except Exception as error:  # each failure of a check is a reason not to trust it
        raise SignatureError(f"the signature is not by {printable(identity)}: {printable(error, 300)}") from None
    if kind != PAYLOAD or not isinstance(statement, dict):
        raise AttestationError("the bundle does not hold an in-toto statement")
    return statement


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"sigstore.{name}")
    except ImportError:
        raise AttestationError(INSTALL) from None
