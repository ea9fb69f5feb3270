"""Log-probabilities of two models: files, and what their noise explains."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from attn_bridge import parity
from attn_bridge.cli.app import run

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 50, size=(4, 32))
EXACT = -RANDOM.exponential(2.0, size=(4, 32)) - 0.1
EXACT[:, 0] = np.nan


def rounded(seed, size=0.01):
    return EXACT + np.random.default_rng(seed).normal(size=EXACT.shape) * size


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_its_size_is_explained(seed):
    report = parity.logprobs(EXACT, rounded(seed), noise=[rounded(90), rounded(91)])
    assert (report.verdict, report.count, report.beyond, report.message) == ("equal", 124, [], "")
    assert report.gap == pytest.approx(0.01, rel=0.3)
    assert report.noise == pytest.approx(0.01, rel=0.3)
    assert report.explained > 0.7


def test_tokens_beyond_the_noise_are_named_the_worst_first():
    off = rounded(1)
    off[2, 5] += 0.1
    off[3, 7] -= 0.3
    report = parity.logprobs(EXACT, off, noise=rounded(90))
    assert report.verdict == "different"
    assert [(one.sequence, one.position) for one in report.beyond] == [(3, 7), (2, 5)]
    assert report.beyond[0].second == off[3, 7]
    assert report.beyond[0].allowed >= 5 * report.noise * (1 - 1e-12)
    assert report.explained < 0.5
    assert "  sequence 3, token 7: " in str(report)


def test_a_gap_of_all_tokens_is_named_although_no_token_is():
    report = parity.logprobs(EXACT, EXACT + 0.035, noise=rounded(90))
    assert (report.verdict, report.beyond) == ("different", [])
    assert re.fullmatch(r"the gap is 3\.\d+ times the noise, allowed 3", report.message)
    assert report.mean == pytest.approx(-0.035)


def test_a_token_with_more_noise_of_its_own_may_be_further_apart():
    off, noisy = rounded(1), rounded(90)
    off[1, 4] += 0.2
    noisy[1, 4] += 0.06
    assert parity.logprobs(EXACT, off, noise=noisy).verdict == "equal"


def test_without_noise_nothing_is_decided(tmp_path, capsys):
    report = parity.logprobs(EXACT, rounded(1))
    assert (report.verdict, report.noise) == ("inconclusive", None)
    np.savez(tmp_path / "a.npz", logprobs=EXACT, tokens=TOKENS)
    assert run(["logprobs", str(tmp_path / "a.npz"), str(tmp_path / "a.npz")]) == 2
    assert capsys.readouterr().err.startswith("error: inconclusive: the noise is unknown: give a model as a side, or")
    nothing = np.full_like(EXACT, np.nan)
    assert parity.logprobs(nothing, nothing).message == "no token has a log-probability on both sides"
    assert parity.logprobs(EXACT, rounded(1), noise=nothing).verdict == "inconclusive"


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("noise", [None, rounded(90)])
def test_a_number_on_one_side_only_is_named_and_decides(value, noise, tmp_path, capsys):
    off = rounded(1)
    off[2, 5] = value
    report = parity.logprobs(EXACT, off, noise=noise)
    (token,) = report.beyond
    assert (report.verdict, report.count, token.sequence, token.position) == ("different", 123, 2, 5)
    assert report.message.startswith(
        "1 token is NaN or -inf on one side only (null in JSON lines, or 0 in an array mask"
    )
    assert f"  sequence 2, token 5: {EXACT[2, 5]:.4f} and {value}\n" in f"{report}\n"
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["beyond"][0]["second"] == str(value)
    swapped = parity.logprobs(off, EXACT, noise=noise)
    assert [(one.sequence, one.position) for one in swapped.beyond][:1] == [(2, 5)]
    assert parity.logprobs(off, off, noise=rounded(90)).verdict == "equal"
    np.savez(tmp_path / "a.npz", logprobs=EXACT)
    np.savez(tmp_path / "b.npz", logprobs=off)
    assert run(["logprobs", str(tmp_path / "a.npz"), str(tmp_path / "b.npz")]) == 1
    assert "1 token is NaN or -inf on one side only" in capsys.readouterr().out


def test_tokens_that_are_marked_as_not_scored_decide_nothing(tmp_path):
    prompts = np.arange(32) >= 3 + np.arange(4)[:, None]
    off = np.where(prompts, rounded(1), np.nan)
    np.savez(tmp_path / "b.npz", logprobs=off, mask=prompts)
    rows = [[None if np.isnan(value) else value for value in row] for row in off.tolist()]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"logprobs": row}) for row in rows))
    for side in (tmp_path / "b.npz", tmp_path / "b.jsonl", rows):
        report = parity.logprobs(EXACT, side, noise=rounded(90))
        assert (report.verdict, report.count) == ("equal", int(prompts.sum()))
    assert parity.logprobs(EXACT, off, noise=rounded(90)).verdict == "different"


def test_noise_that_overflows_explains_nothing():
    off, noisy = rounded(1), rounded(90)
    off[2, 5] -= 1.0
    noisy[1, 4] = -np.inf
    assert parity.logprobs(EXACT, off, noise=noisy).verdict == "different"
    assert parity.logprobs(EXACT, rounded(1), noise=noisy).verdict == "equal"


def test_files_of_both_formats(tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("a.npz", "b.jsonl", "noise.npz", "out.json")]
    off = rounded(1)
    off[2, 5] -= 1.0
    np.savez(files[0], logprobs=EXACT, tokens=TOKENS)
    np.savez(files[2], logprobs=rounded(90))
    rows = [[None, *map(float, row[1:])] for row in off]
    lines = [{"tokens": ids.tolist(), "logprobs": row} for ids, row in zip(TOKENS, rows, strict=True)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert run(["logprobs", files[0], files[1], "--noise", files[2], "--json", files[3]]) == 1
    assert capsys.readouterr().out.startswith("different: 124 tokens, ")
    data = json.loads((tmp_path / "out.json").read_text())
    assert [(one["sequence"], one["position"], one["token"]) for one in data["beyond"]] == [(2, 5, int(TOKENS[2, 5]))]
    assert run(["logprobs", files[0], files[0], "--noise", files[2]]) == 0


def test_sequences_may_have_any_lengths():
    ragged = [[-1.0, -2.0, -3.0], [-0.5]]
    report = parity.logprobs(ragged, ragged, noise=[[[-1.01, -2.0, -3.0], [-0.5]]])
    assert (report.verdict, report.count, report.gap) == ("equal", 4, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "each line must be an object with logprobs"),
        ("[1]", "each line must be an object with logprobs"),
        ("", "each line must be an object with logprobs"),
        ('{"logprobs": [0.5]}', "logprobs (0.5) must be at most 0"),
        ('{"logprobs": [Infinity]}', "logprobs (inf) must be at most 0"),
        ('{"logprobs": []}', "logprobs must hold at least one number"),
        ('{"logprobs": [-1, -2], "tokens": [3]}', "tokens [1] must be as many as logprobs [2]"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ("{", "Expecting property name enclosed in double quotes"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} must be an .npz file .*{re.escape(message)}"):
        parity.logprobs(path, EXACT)


def test_other_refusals(tmp_path):
    np.savez(tmp_path / "a.npz", logprobs=EXACT, tokens=TOKENS)
    np.savez(tmp_path / "b.npz", logprobs=EXACT, tokens=TOKENS + (np.arange(32) == 3))
    np.savez(tmp_path / "c.npz", numbers=EXACT)
    for second, message in (
        (tmp_path / "b.npz", f"both sides must score the same tokens; sequence 0 has {TOKENS[0, 3]} and "),
        (tmp_path / "c.npz", r".*it has no array logprobs; it has numbers"),
        (tmp_path / "d.npz", r".*d.npz does not exist"),
        (EXACT[:, 1:], "both sides must hold as many tokens per sequence, got "),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            parity.logprobs(tmp_path / "a.npz", second)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tokens": [1.5, 2], "logprobs": [-1, -1]}', r"tokens \(float64\) must be whole numbers"),
        ('{"tokens": [1e400, 2], "logprobs": [-1, -1]}', r"tokens \(float64\) must be whole numbers"),
        ('{"tokens": [99999999999999999999999, 2], "logprobs": [-1, -1]}', r"tokens \(object\) must be whole numbers"),
        ('{"tokens": [1, 2], "logprobs": ["-1", "-1"]}', r"logprobs \(str\d*\) must be numbers or null"),
        ('{"tokens": [1, 2], "logprobs": [false, false]}', r"logprobs \(bool\) must be numbers or null"),
    ],
)
def test_numbers_that_would_be_cut_off_or_converted_are_refused(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(ValueError, match=f"a.jsonl must be .*: {message}$"):
        parity.logprobs(tmp_path / "a.jsonl", tmp_path / "a.jsonl")


def jumping(seed, places):
    """Return rounded log-probabilities with jumps, as of a mixture whose experts rounding changes there."""
    scores = rounded(seed)
    scores[places] -= 0.3
    return scores


def test_few_tokens_that_jump_where_the_noise_jumps_elsewhere_get_a_hint():
    noise = jumping(90, ([0, 1], [3, 5]))
    report = parity.logprobs(EXACT, jumping(1, ([2, 3], [7, 9])), noise=noise)
    assert (report.verdict, len(report.beyond), report.message) == ("different", 2, "")
    size = r"over 10 times the usual noise of 0\.01\d* nats"
    cause = r"as where rounding changes a choice, such as the experts of a mixture"
    assert re.match(rf"2 tokens are {size} apart, and 2 in the noise, {cause}; a fault that few tokens ", report.hint)
    assert f"\nhint: {report.hint}\n" in str(report)
    many = parity.logprobs(EXACT, jumping(1, (np.arange(40) % 4, 1 + np.arange(40) % 31)), noise=noise)
    assert (many.verdict, many.message) == ("different", "")
    assert re.match(r"40 tokens are over 10 times .* apart, 2 in the noise .*: a fault, or a second side", many.hint)
    assert parity.logprobs(EXACT, jumping(1, ([2], [7])), noise=rounded(90)).hint == ""


def test_jumps_of_the_noise_say_which_faults_they_hide():
    report = parity.logprobs(EXACT, rounded(1), noise=jumping(90, ([0, 1], [3, 5])))
    assert report.verdict == "equal"
    assert re.match(r"up to 2 tokens per run of the noise .* a fault that moves few tokens by less than 0\.\d+ nats",
                    report.hint)  # fmt: skip
    assert parity.logprobs(EXACT, rounded(1), noise=rounded(90)).hint == ""


def test_jumps_of_the_noise_hide_no_shift_of_most_tokens():
    report = parity.logprobs(EXACT, rounded(1) - 0.06, noise=jumping(90, ([0, 1], [3, 5])))
    assert (report.verdict, report.beyond, report.hint) == ("different", [], "")
    assert re.fullmatch(
        r"\d+ of 124 tokens are further apart than 3 times their own noise, allowed half", report.message
    )
