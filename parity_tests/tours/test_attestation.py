"""Attestations: signed and verified, and refused after any change of bytes, code, weights or key."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import types

import pytest

from attn_bridge.cli.app import run
from attn_parity.attestation import envelope, keyless, statement, verification

pytest.importorskip("torch")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402 - after the skip

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        torch.nn.init.constant_(self.fc.bias, {bias})

    def forward(self, x):
        return torch.relu(self.fc(x)) + open("offset.txt").read().count("x")
"""


def write_key(folder, name, key):
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / f"{name}.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A folder with a pair, its report, and keys."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "net.py").write_text(NET.format(bias=0.5))
    (folder / "offset.txt").write_text("")
    words = ["compare", "net.py:Net", "net.py:Net", "--shape", "2,4", "--seeds", "1", "--json", "./report.json"]
    subprocess.run([sys.executable, "-m", "attn_bridge", *words], cwd=folder, check=True, capture_output=True)
    write_key(folder, "key", ed25519.Ed25519PrivateKey.generate())
    write_key(folder, "other", ec.generate_private_key(ec.SECP256R1()))
    return folder


@pytest.fixture
def here(judged, monkeypatch):
    monkeypatch.chdir(judged)
    return judged


def verified(capsys, *words):
    status = run(["verify-attestation", *words])
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("\n") == 1
    return status, printed.out + printed.err


@pytest.mark.parametrize("key", ["key", "other"])
def test_a_right_attestation_is_verified_and_a_changed_byte_is_not(key, here, capsys):
    assert run(["attest", "report.json", "--key", f"{key}.pem", "-o", "a.json"]) == 0
    assert capsys.readouterr().out == "wrote a.json: equal, 6 digests\n"
    assert verified(capsys, "a.json", "--key", f"{key}.pub", "--digests-only") == (
        0,
        "verified: signature and files: equal\n",
    )
    data = json.loads((here / "a.json").read_text())
    payload = base64.b64decode(data["payload"])
    for position in (10, len(payload) // 2, len(payload) - 3):
        changed = payload[:position] + bytes([payload[position] ^ 1]) + payload[position + 1 :]
        (here / "b.json").write_text(json.dumps({**data, "payload": base64.b64encode(changed).decode()}))
        line = f"not verified: the signature is not by {key}.pub over this statement: "
        line += "it was changed, or the key is another\n"
        assert verified(capsys, "b.json", "--key", f"{key}.pub", "--digests-only") == (1, line)
    other = "other" if key == "key" else "key"
    assert verified(capsys, "a.json", "--key", f"{other}.pub", "--digests-only")[0] == 1
    assert verified(capsys, "a.json") == (
        2, "error: give the public key of the signer, --key PUB: without it the signature means nothing\n"
    )  # fmt: skip


def test_the_statement_is_in_totos_and_names_every_subject(here):
    content = statement.of_report(here / "report.json")
    assert content["_type"] == "https://in-toto.io/Statement/v1"
    names = ["report", "first code", "first weights", "second code", "second weights", "inputs"]
    assert [each["name"] for each in content["subject"]] == names
    assert all(len(each["digest"]["sha256"]) == 64 for each in content["subject"])
    assert content["predicate"]["judge"].keys() == {"version", "code"}
    signed = envelope.signed(content, here / "key.pem")
    assert signed["payloadType"] == "application/vnd.in-toto+json"
    assert envelope.encoded("a", b"bc") == b"DSSEv1 1 a 2 bc"
    assert envelope.opened(signed, here / "key.pub") == content


def test_a_review_is_attested_pair_by_pair(here, tmp_path):
    report = json.loads((here / "report.json").read_text())
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/a.json").write_text(json.dumps(report))
    pairs = [{"name": "a", "report": "pairs/a.json"}]
    review = {"kind": "review", "commit": "c", "tree": "t", "manifest": "m", "judge": {"version": "1"}, "pairs": pairs}
    (tmp_path / "report.json").write_text(json.dumps(review))
    content = statement.of_report(tmp_path / "report.json")
    assert [each["name"] for each in content["subject"]][1:3] == ["a: first code", "a: first weights"]
    assert content["predicate"]["commit"] == "c"
    _, [comparison] = statement.comparisons(content)
    assert (comparison.name, comparison.verdict, comparison.words[:2]) == ("a", "equal", ["compare", "net.py:Net"])
    content["subject"][2]["digest"]["sha256"] = "0" * 64
    with pytest.raises(statement.AttestationError, match="the statement is not one on verdicts"):
        statement.comparisons(content)
    pairs.append({"name": "b", "verdict": "inconclusive", "message": "too slow"})
    (tmp_path / "report.json").write_text(json.dumps(review))
    with pytest.raises(statement.AttestationError, match="pair b was not judged: too slow"):
        statement.of_report(tmp_path / "report.json")


def test_other_code_weights_and_numbers_are_one_line_each(here, capsys, monkeypatch):
    assert run(["attest", "report.json", "--key", "key.pem", "-o", "a.json"]) == 0
    capsys.readouterr()
    done = verified(capsys, "a.json", "--key", "key.pub", "--timeout", "600")
    assert done == (0, "verified: signature, code, weights, inputs and one sample: equal\n")
    # One constant further, the files are other ones; a file that no digest covers changes the numbers of neither.
    net = (here / "net.py").read_text()
    (here / "net.py").write_text(net.replace("0.5", "0.6"))
    try:
        line = "not verified: code of the first side: net.py is not the attested file\n"
        assert verified(capsys, "a.json", "--key", "key.pub") == (1, line)
        monkeypatch.setattr(verification, "check_files", lambda comparison, folder: iter(()))
        assert verified(capsys, "a.json", "--key", "key.pub", "--timeout", "600") == (1, line)
    finally:
        (here / "net.py").write_text(net)


SUBJECTS = {
    **{side: {"files": {"a.py": "1"}, "modules": {}, "weights": "w", "code": "c"} for side in ("first", "second")},
    "inputs": ["i"],
    "rules": None,
}


def changed(path, value):
    data = json.loads(json.dumps(SUBJECTS))
    *way, last = path
    node = data
    for key in way:
        node = node[key]
    node[last] = value
    return data


SAMPLES = [
    ("equal", "equal", SUBJECTS, None),
    (
        "equal",
        "equal",
        changed(["second", "weights"], "v"),
        "weights of the second side: they are not the attested ones",
    ),
    ("equal", "equal", changed(["inputs"], ["j"]), "inputs: they are not the attested ones"),
    ("equal", "equal", changed(["rules"], "r"), "rules: they are not the attested ones"),
    ("equal", "equal", changed(["first", "modules"], {"m": "2"}), "code of the first side: m is not the attested file"),
    ("equal", "different", SUBJECTS, "numbers: attested equal, one sample is different"),
    ("different", "different", SUBJECTS, None),
    ("different", "equal", SUBJECTS, "a difference may need more draws"),
]


@pytest.mark.parametrize(("attested", "verdict", "subjects", "line"), SAMPLES)
def test_a_sample_is_held_against_each_digest_and_the_verdict(attested, verdict, subjects, line, tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_sample", lambda *_: {"verdict": verdict, "subjects": subjects})
    comparison = statement.AttestedComparison("", attested, {}, ["compare", "a.py:A", "a.py:B"], SUBJECTS)
    try:
        lines = list(verification.check_sample(comparison, tmp_path, 1.0))
    except statement.AttestationError as error:
        lines = [str(error)]
    assert (lines == []) if line is None else (line in lines[0])


def test_what_can_not_be_attested_or_read_is_one_line(here, capsys):
    report = json.loads((here / "report.json").read_text())
    cases = {
        "gone": None,
        "text": "{",
        "list": "[]",
        "plain": json.dumps({**report, "subjects": {}}),
        "open": json.dumps({**report, "verdict": "inconclusive", "message": "too slow"}),
    }
    lines = {
        "gone": "gone.json cannot be read: No such file or directory",
        "text": "text.json is not JSON",
        "list": "list.json is not a report of compare or review",
        "plain": "plain.json has no digests: write it with attn-bridge compare --json FILE, or review",
        "open": "open.json has no verdict to attest: inconclusive: too slow",
    }
    for name, text in cases.items():
        if text is not None:
            (here / f"{name}.json").write_text(text)
        assert run(["attest", f"{name}.json", "--key", "key.pem", "-o", "new.json"]) == 2
        assert capsys.readouterr().err == f"error: {lines[name]}\n"
    write_key(here, "rsa", rsa.generate_private_key(65537, 2048))
    keys = {"gone.pem": "cannot be read: No such file or directory", "report.json": "is not a private key in PEM",
            "rsa.pem": "must be an Ed25519 or ECDSA key"}  # fmt: skip
    for name, line in keys.items():
        assert run(["attest", "report.json", "--key", name, "-o", "new.json"]) == 2
        assert capsys.readouterr().err == f"error: --key {name} {line}\n"
    assert not (here / "new.json").exists()
    assert verified(capsys, "report.json", "--key", "key.pub") == (2, "error: it is not a DSSE envelope\n")
    unrelated = envelope.signed({"_type": "x"}, here / "key.pem")
    (here / "x.json").write_text(json.dumps(unrelated))
    line = "error: the statement is not one on verdicts of attn-bridge\n"
    assert verified(capsys, "x.json", "--key", "key.pub") == (2, line)


def test_without_a_key_sigstore_signs_or_is_asked_for(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sigstore", None)
    assert run(["attest", "report.json", "-o", "new.json"]) == 2
    assert capsys.readouterr().err == f"error: {keyless.INSTALL}\n"
    modules = {name: types.ModuleType(f"sigstore.{name}") for name in ("sign", "dsse", "oidc", "models")}
    modules["oidc"].detect_credential = lambda: None
    monkeypatch.setattr(keyless, "_load", modules.__getitem__)
    assert run(["attest", "report.json", "-o", "new.json"]) == 2
    assert capsys.readouterr().err.startswith("error: sigstore found no identity here: ")
    (here / "bundle.json").write_text('{"dsseEnvelope": {}}')
    line = "error: it is signed by sigstore: give the signer, --identity\n"
    assert verified(capsys, "bundle.json", "--key", "key.pub") == (2, line)
