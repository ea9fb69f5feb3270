"""``attn-bridge attest`` and ``verify-attestation``: verdicts bound to code and weights, and checked again."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_bridge import whole_files

from .compare import check_timeout

if TYPE_CHECKING:
    from ..results.changes import Data


def attest(
    report: Annotated[Path, typer.Argument(metavar="REPORT.json", help="A report of compare --json, or of review.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The attestation to write.")],
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Private key in PEM, Ed25519 or ECDSA; default: sigstore, by network."),
    ] = None,
) -> int:
    """Sign the verdicts of a report with the digests of code, weights, inputs and judge.

    The file is an in-toto statement in a DSSE envelope, signed by a key file, or by sigstore (extra sigstore).

    Example: attn-bridge attest report.json --key key.pem -o report.intoto.json

    Exit status: 0 = written, 2 = the report or the key can't be used.
    """
    from ..attestation import envelope, keyless, statement

    target = whole_files.checked(output)
    content = statement.of_report(report)
    signed = keyless.signed(content) if key is None else envelope.signed(content, key)
    whole_files.write(target, json.dumps(signed, indent=1) + "\n")
    verdicts = ", ".join(dict.fromkeys(each["verdict"] for each in content["predicate"]["comparisons"]))
    typer.echo(f"wrote {output}: {verdicts}, {len(content['subject'])} digests")
    return 0


def verify_attestation(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An attestation, written by attest.")],
    key: Annotated[Path | None, typer.Option(metavar="PUB", help="Public key in PEM of the signer.")] = None,
    identity: Annotated[
        str | None, typer.Option(help="Signed by sigstore: the signer's e-mail address or workflow.")
    ] = None,
    issuer: Annotated[str | None, typer.Option(metavar="URL", help="With --identity: its OIDC issuer.")] = None,
    digests_only: Annotated[
        bool, typer.Option("--digests-only", help="Check signature and files, and run nothing.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest that the sample may take.")] = 60.0,
) -> int:
    """Check an attestation: its signature, the files in the current folder, and the numbers by one sample.

    The sample runs one attested comparison, picked at random, with one draw in a confined process, and checks weights,
    inputs and verdict.

    Example: attn-bridge verify-attestation report.intoto.json --key key.pub

    Exit status: 0 = right, 1 = the signature, a file, a weight, an input or a verdict is another, 2 = it can't be
    checked.
    """
    from ..attestation import statement, verification
    from ..attestation.envelope import SignatureError

    check_timeout(timeout)
    try:
        content = _opened(statement.read_json(file), key, identity, issuer)
    except SignatureError as error:
        typer.echo(f"not verified: {error}")
        return 1
    judge, comparisons = statement.comparisons(content)
    folder = Path.cwd()
    problem = next((line for each in comparisons for line in verification.check_files(each, folder)), None)
    sample = secrets.choice(comparisons)
    if problem is None and not digests_only:
        problem = next(verification.check_sample(sample, folder, timeout), None)
    if problem is not None:
        typer.echo(f"not verified: {problem}")
        return 1
    checked = "signature and files" if digests_only else "signature, code, weights, inputs and one sample"
    verdicts = ", ".join(f"{each.name} {each.verdict}".strip() for each in comparisons)
    typer.echo(f"verified: {checked}: {verdicts}{_other_judge(judge)}")
    return 0


def _opened(data: Data, key: Path | None, identity: str | None, issuer: str | None) -> Data:
    """Return the statement behind a signature that is right."""
    from ..attestation import envelope, keyless

    if "dsseEnvelope" in data:
        if identity is None:
            raise ValueError("it is signed by sigstore: give the signer, --identity")
        return keyless.opened(data, identity, issuer)
    if key is None:
        raise ValueError("give the public key of the signer, --key PUB: without it the signature means nothing")
    return envelope.opened(data, key)


def _other_judge(judge: Data) -> str:
    """Return a remark where the attested judge is not the installed one."""
    from ..attestation import subjects

    now = subjects.judge()
    return (
        "" if judge == now else f"; attested by another judge (version {judge.get('version')}, here {now['version']})"
    )
