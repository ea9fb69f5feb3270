"""Every block of README.md, CONTRIBUTING.md and docs runs as printed, in a fresh folder, and gives what is shown.

The blocks of a page run in order: Python in one namespace, commands (``$``) in one folder. A block below a line with
nothing but a file name is that file. ``<!-- not run: REASON -->`` in front of a block leaves it out. A page with
``<!-- continues: PAGE -->`` runs behind that page, in its folder and with its names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import attn_bridge
import torch_attn
from attn_bridge import checkpoints
from attn_bridge.cli.app import run as run_command
from attn_bridge.models.families import known_model_types
from fault_lab.gallery import GalleryTrial, judge_entry, judge_trial, plan_gallery

from ..wild import gallery

ROOT = Path(attn_bridge.__file__).parent.parent
PAGES = [
    path.relative_to(ROOT).as_posix()
    for glob in ("*.md", "docs/*.md", "docs/guides/*.md")
    for path in sorted(ROOT.glob(glob))
]
CONTINUES = re.compile(r"^<!-- continues: (.+) -->$", re.MULTILINE)


def parts_of(name: str) -> list[str]:
    """Return a page and those that continue it, in order."""
    followers = [page for page in PAGES if (found := continued(page)) and found == name]
    return [name, *(part for page in followers for part in parts_of(page))]


def continued(name: str) -> str:
    """Return the page that a page continues, "" for none."""
    found = CONTINUES.search((ROOT / name).read_text(encoding="utf-8"))
    return f"docs/{found[1]}" if found else ""


# ---- blocks


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language and text, the line it begins at, the file that it is, why it is not run."""

    language: str
    text: str
    line: int
    file: str
    not_run: str


def blocks_of(markdown: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    found: list[Block] = []
    file = not_run = ""
    fence: tuple[str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(markdown.splitlines(), 1):
        if fence is not None:
            if line == "```":
                found.append(Block(fence[0], "".join(f"{one}\n" for one in body), fence[1], file, not_run))
                fence, file, not_run = None, "", ""
            else:
                body.append(line)
        elif line.startswith("```"):
            fence, body = (line[3:], number), []
        elif match := re.fullmatch(r"<!-- not run: (.+) -->", line):
            not_run = match[1]
        elif match := re.fullmatch(r"`([\w/.-]+\.\w+)`", line):
            file = match[1]
        elif line and not line.startswith("<!-- begin: "):
            file = not_run = ""
    assert fence is None, "the last block has no end"
    return found


@dataclasses.dataclass
class Page:
    """What running the blocks of a page left behind: the names of its Python, and what was printed."""

    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    printed: str = ""

    def run(self, block: Block) -> None:
        """Run a block in the current folder."""
        if block.not_run:
            return
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            code = compile("\n" * block.line + block.text, "page", "exec")  # so that a traceback names the page's line
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(code, self.names)
            self.printed += out.getvalue()
        elif block.language == "console":
            parts = re.split(r"^\$ (.+)\n", block.text, flags=re.MULTILINE)
            assert not parts[0], f"line {block.line}: a console block begins with $"
            for command, shown in zip(parts[1::2], parts[2::2], strict=True):
                status, printed = run_as_printed(command)
                assert status == int(bool(re.match(r"different:|precision:|.+: [0-9]+ broken,", shown))), printed
                assert_as_shown(command, shown, printed)
                self.printed += printed
        else:
            assert block.language == "text", f"line {block.line}: a block of {block.language or 'no language'}"


def run_as_printed(command: str) -> tuple[int, str]:
    """Run a command of the documentation; return its status and what it printed."""
    words = shlex.split(command, comments=True)
    if words[0] == "attn-bridge":
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = run_command(words[1:])
        return status, out.getvalue()
    assert words[0] == "python", f"{command}: mark it with <!-- not run: REASON -->"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-W error -p no:cacheprovider"}
    done = subprocess.run(
        [sys.executable, *words[1:]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def assert_as_shown(command: str, shown: str, printed: str) -> None:
    """Hold what a page shows against what was printed; ``...`` on a line of its own stands for any lines.

    Of ``compare`` the verdict, place and hint count, of ``check`` the last line: other numbers depend on the processor.
    """
    if shown.strip():
        parts = re.split(r"^\.\.\.$", essence(command, shown), flags=re.MULTILINE)
        pattern = " ?.*".join(re.escape(" ".join(part.split())) for part in parts)
        assert re.fullmatch(pattern, " ".join(essence(command, printed).split())), f"$ {command}\n{printed}"


def essence(command: str, text: str) -> str:
    """Return the part of an output that is the same on every machine, with its seconds masked."""
    if " compare" in command:
        text = re.split(r"^(?:largest errors.*)?$", text.lstrip("\n"), maxsplit=1, flags=re.MULTILINE)[0]
    if " check" in command:
        text = text.rstrip().rpartition("\n")[2]
    return re.sub(r"\b\d+(?:\.\d+)?\s+s\b", "# s", text)


# ---- pages


MARKS = {"docs/randomness.md": pytest.mark.optimized, "docs/devices.md": pytest.mark.full}
"""Page -> its mark: bits of random numbers, and meshes of processes, which the tests of meshes start as well."""


FIRST_PAGES = [name for name in PAGES if not continued(name)]


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[MARKS[name]] if name in MARKS else []) for name in FIRST_PAGES]
)
def test_a_page_runs_as_printed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gallery, "_ENTRIES", dict(gallery._ENTRIES))  # the example of docs/gallery.md adds one
    page = Page()
    for part in parts_of(name):
        for block in blocks_of((ROOT / part).read_text(encoding="utf-8")):
            page.run(block)
        if part in CHECKS:
            CHECKS[part](page)


def check_readme(page: Page) -> None:
    assert "torch -> flax: 4 tensors copied bit for bit" in page.printed
    assert Path("gpt2-again/model.safetensors").read_bytes() == Path("demo/gpt2/model.safetensors").read_bytes()


def check_backends(page: Page) -> None:
    names = page.names
    assert names["weights"].shape == (2, 2, 6, 6)
    assert "torch -> flax: 5 tensors copied bit for bit" in page.printed
    assert names["kernels"]["h.0.attn.q.kernel"].shape == (32, 8, 8)
    assert_same_arrays(names["back"], names["arrays"])
    assert_same_arrays(names["from_file"], names["kernels"])


def check_modern(page: Page) -> None:
    names = page.names
    assert names["report"].verdict == "equal"
    assert_same_arrays(names["back"], names["state"])
    whole = names["qwen"](names["x"])
    parts = np.concatenate([names["first"], names["last"]], 1)
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    assert np.abs(whole).max() > 0.1


def check_compare(page: Page) -> None:
    names = page.names
    assert "eps of LayerNorm is 1e-05 in torch and 1e-06 in Flax" in str(names["report"])
    assert names["report"].verdict == "different"
    assert (names["fixed"].verdict, names["recorded"].verdict) == ("equal", "equal")
    assert Path("report.html").read_text().startswith("<!doctype html>")
    assert [report.verdict for report in names["reports"]] == ["equal"] * 4
    assert {report.samples for report in names["reports"]} == {17}


def check_pairing(page: Page) -> None:
    assert page.names["ruled"].verdict == "equal"
    assert [pair.how for pair in page.names["ruled"].pairing] == ["rule"] * 2


def check_logprobs(page: Page) -> None:
    assert (page.names["same"].verdict, page.names["warm"].verdict) == ("equal", "different")


def check_checkpoints(_: Page) -> None:
    assert Path("bert-again/model.safetensors").read_bytes() == Path("demo/bert/model.safetensors").read_bytes()


def check_checkpoints_in_python(page: Page) -> None:
    names = page.names
    assert names["found"].passed
    assert (names["seen"].format, names["seen"].layout, names["seen"].has_manifest) == ("safetensors", "flax", True)
    assert names["arrays"].keys() == names["seen"].tensors.keys()
    assert names["array"].dtype.name == "bfloat16"
    assert names["result"].changed
    assert names["tokens"].shape == (1, 8)
    held = names["attention"].W_query.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(names["attention_nnx"].W_query.kernel[...]).T, held)


def check_rules(_: Page) -> None:
    rules = resources.files("attn_bridge.cli") / "demo_files" / "rules.toml"
    assert Path("demo/rules.toml").read_text() == rules.read_text()  # the block of the page is what demo writes
    assert_rules_place_every_element(checkpoints.read("demo/own.safetensors"), checkpoints.read("own.msgpack"))
    own = {"rules": "demo/rules.toml", "settings": {"heads": 4}}
    checkpoints.convert("own.msgpack", "back.safetensors", **own)
    assert Path("back.safetensors").read_bytes() == Path("demo/own.safetensors").read_bytes()


def assert_rules_place_every_element(arrays: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    """Hold what demo/rules.toml makes against what its comments say."""
    assert np.array_equal(found["embed.embedding"], arrays["embed.weight"])
    out = arrays["blocks.1.out.weight"].reshape(8, 4, 2)
    assert np.array_equal(found["layers_1.out.kernel"], out.transpose(1, 2, 0))
    qkv = found["layers_2.qkv.kernel"].reshape(8, 4, 3, 2)
    assert np.array_equal(qkv[:, :, 1], arrays["blocks.2.k.weight"].T.reshape(8, 4, 2))
    mlp = np.concatenate([arrays["blocks.0.gate.weight"], arrays["blocks.0.up.weight"]])
    assert np.array_equal(found["layers_0.mlp.kernel"], mlp.T)
    assert np.array_equal(found["norms.scale"], [arrays[f"blocks.{i}.norm.weight"] for i in range(3)])
    assert len(found) == 11


def check_randomness(page: Page) -> None:
    names, theirs = page.names, nnx.Rngs(0, dropout=1)
    assert names["key"].numpy().view(np.uint32).tolist() == jax.random.key_data(theirs.dropout()).tolist()
    np.testing.assert_array_equal(names["mask"].numpy(), np.asarray(theirs.dropout.bernoulli(0.9, (2, 8))))
    np.testing.assert_array_equal(
        names["numbers"].numpy(), np.asarray(theirs.params.uniform((4,), minval=-0.3, maxval=0.9))
    )
    torch.manual_seed(789)
    weight = torch_attn.SelfAttention_v2(3, 2).W_query.weight.detach()
    assert [[round(float(x), 4) for x in row] for row in weight] == [
        [0.3161, 0.4568, 0.5118],
        [-0.1683, -0.3379, -0.0918],
    ]
    torch.manual_seed(123)
    dropped = np.asarray(nn.functional.dropout(torch.ones(6, 6), 0.5))
    assert page.printed.endswith(f"{dropped}\n")


def check_arrays(page: Page) -> None:
    assert page.printed.startswith("precision ")
    assert page.names["wrong"].share > 1


def check_training(page: Page) -> None:
    names = page.names
    assert [names[name].verdict for name in ("report", "own", "in_train_mode")] == ["equal"] * 3
    assert "first weights: drawn from seed 1" in names["own"].settings
    assert "train mode: both sides drop by the same masks, 1 per call" in names["in_train_mode"].notes


def check_gallery(_: Page) -> None:
    found = [judge_trial(one) for one in plan_gallery("mine.py")]
    assert [(one.trial.fault, one.right) for one in found] == [("", "yes"), ("gelu-tanh", "yes"), ("norm-eps", "yes")]
    added = gallery._ENTRIES["my-block"]
    assert len(added.faults) == 2
    trials = [GalleryTrial("", added.name, fault) for fault in ("", *added.faults)]
    assert [judge_entry(added, one).right for one in trials] == ["yes"] * 3


def check_extending(page: Page) -> None:
    layout, theirs = (
        page.names["layout"],
        {
            "transformer.wte.weight": np.ones((5, 4)),
            "transformer.h.0.mlp.c_fc.weight": np.arange(8.0).reshape(4, 2),
            "transformer.h.0.attn.c_attn.bias": np.arange(6.0),
            "transformer.h.0.attn.bias": np.tri(3),
        },
    )
    kept = layout.select(theirs)
    assert theirs.keys() - kept == {"transformer.h.0.attn.bias"}
    ours = layout.to_canonical({name: theirs[name] for name in kept})
    assert len(ours) == 6
    assert np.array_equal(ours["trf_blocks.0.ff.layers.0.weight"], theirs["transformer.h.0.mlp.c_fc.weight"].T)
    assert ours["trf_blocks.0.att.W_key.bias"].tolist() == [2, 3]


CHECKS = {
    "README.md": check_readme,
    "docs/arrays.md": check_arrays,
    "docs/backends.md": check_backends,
    "docs/checkpoints.md": check_checkpoints,
    "docs/checkpoints-in-python.md": check_checkpoints_in_python,
    "docs/compare.md": check_compare,
    "docs/extending.md": check_extending,
    "docs/gallery.md": check_gallery,
    "docs/logprobs.md": check_logprobs,
    "docs/modern.md": check_modern,
    "docs/pairing.md": check_pairing,
    "docs/randomness.md": check_randomness,
    "docs/rules.md": check_rules,
    "docs/training.md": check_training,
}
"""What else holds after the blocks of a page have run."""


def assert_same_arrays(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Hold two dicts of arrays against each other, to the last bit."""
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())


# ---- what is said beside the blocks


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize("seed", range(5))
def test_the_readmes_norms_differ_only_on_hard_inputs(seed):
    torch_norm, flax_norm = nn.LayerNorm(16), nnx.LayerNorm(16, rngs=nnx.Rngs(0))
    x = np.random.default_rng(seed).normal(size=(2, 7, 16)).astype(np.float32)

    def apart(x):
        ours, theirs = torch_norm(torch.from_numpy(x)).detach().numpy(), np.asarray(flax_norm(x))
        return np.abs(ours - theirs).max(), np.abs(ours).max()

    assert apart(x)[0] < 1e-4
    difference, largest = apart(x / 100)
    assert 0.03 < difference / largest < 0.2


def test_the_picture_of_the_report_shows_what_compare_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_as_printed("attn-bridge demo")
    source = (ROOT / "docs" / "report.svg").read_text(encoding="utf-8")
    assert "url(http" not in source
    assert "@import" not in source
    nodes = [node for node in ElementTree.fromstring(source).iter() if node.tag.endswith("}text")]
    rows: dict[float, str] = {}
    for node in nodes:
        row = float(node.attrib["y"])
        rows[row] = rows.get(row, "") + (node.text or "").replace("\xa0", " ")
    shown = "\n".join(line.rstrip() for line in rows.values())
    match = re.match(r"\$ (attn-bridge compare \S+\s\S+\s--inputs\s\S+)\s", shown)
    assert match is not None, shown
    command = " ".join(match[1].split())
    status, printed = run_as_printed(command)
    assert status == 1
    verdict = shown[match.end() :].partition("hint:")[0]
    assert " ".join(essence("", verdict).split()) in " ".join(essence("", printed).split())


def test_pages_name_files_that_exist():
    missing = []
    for name in PAGES:
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                missing.append((name, target))
    assert missing == []


def test_pages_name_headings_that_exist():
    missing = []
    for name in PAGES:
        page = ROOT / name
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", page.read_text(encoding="utf-8")):
            other = page.parent / target if target else page
            headings = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings]:
                missing.append((name, target, anchor))
    assert missing == []


def test_the_map_names_rooms_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (?:\.\.\. )?(`.+?) \|", text, re.MULTILINE)
    rooms = [word for cell in cells for word in re.findall(r"`([\w/]+)`", cell)]
    assert len(rooms) > 30
    homes = ("", "torch_attn", "jax_attn", "attn_bridge", "attn_parity")
    paths = {room: [ROOT / home / name for home in homes for name in (room, f"{room}.py")] for room in rooms}
    assert [room for room, places in paths.items() if not any(path.exists() for path in places)] == []


def test_the_page_on_modern_attention_knows_all_families():
    text = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("modern.md", "families.md"))
    assert [name for name in known_model_types() if f"`{name}`" not in text] == []


def test_the_linen_example_runs_and_agrees(capsys):
    runpy.run_path(str(ROOT / "examples" / "linen.py"), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition(" ")[2]) < 1e-6


# ---- what demo writes


@pytest.mark.parametrize(
    ("folder", "model"), [("gpt2", "GPT2LMHeadModel"), ("bert", "BertModel"), ("llama", "LlamaForCausalLM")]
)
def test_transformers_loads_the_checkpoints_of_demo(folder, model, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert run_as_printed("attn-bridge demo")[0] == 0
    loaded, report = getattr(transformers, model).from_pretrained(f"demo/{folder}", output_loading_info=True)
    assert not any(report.values()), report
    kinds = {"gpt2": torch_attn.GPTModel, "bert": torch_attn.BertEncoder, "llama": torch_attn.DecoderModel}
    module = kinds[folder].from_pretrained(f"demo/{folder}")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        torch.testing.assert_close(module(tokens), loaded.eval()(tokens)[0], atol=1e-4, rtol=1e-4)


# ---- the runner of blocks itself


RIGHT = """
`mine.txt`
```text
kept
```

```python
from pathlib import Path

print(Path("mine.txt").read_text())
```

```console
$ attn-bridge demo
wrote demo
...
  rules.toml       the rules that convert it to Flax, with --set heads=4
...
```

<!-- not run: there is no such command -->
```console
$ nothing
```
"""

WRONG = {
    "a name that is not there": ('("mine.txt', '("yours.txt', FileNotFoundError),
    "another verdict": ("wrote demo", "wrote it", AssertionError),
    "a line too few": ("...\n```\n\n<", "```\n\n<", AssertionError),
    "a line in between": ("wrote demo\n...\n", "wrote demo\n", AssertionError),
    "bad usage": ("$ attn-bridge demo", "$ attn-bridge demo --what", AssertionError),
    "an unknown command": ("<!-- not run: there is no such command -->\n", "", AssertionError),
    "a reason too far away": ("command -->\n", "command -->\nA sentence.\n", AssertionError),
    "an unknown language": ("```console", "```bash", AssertionError),
    "no end": ("$ nothing\n```\n", "$ nothing\n", AssertionError),
}
"""What to replace in `RIGHT`, by what, and what is raised."""


def run_page(markdown: str) -> Page:
    page = Page()
    for block in blocks_of(markdown):
        page.run(block)
    return page


def test_a_right_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_page(RIGHT).printed.startswith("kept\n")


@pytest.mark.parametrize("label", WRONG)
def test_a_wrong_page_is_seen(label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new, error = WRONG[label]
    assert old in RIGHT
    with pytest.raises(error):
        run_page(RIGHT.replace(old, new, 1))


MADE = """
`greet.py`
```python
print("hello")
```
<!-- begin: python greet.py -->
<!-- end -->

`greet.py`
```python
print("good bye")
```
<!-- begin: python greet.py -->
```console
stale
```
<!-- end -->
"""


def test_a_pages_commands_run_on_the_files_shown_before(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(MADE, encoding="utf-8")
    runpy.run_path(str(ROOT / "docs" / "generate.py"))["_make_page"](page)
    shown = [block.text for block in blocks_of(page.read_text(encoding="utf-8")) if block.language == "console"]
    assert shown == ["$ python greet.py\nhello\n", "$ python greet.py\ngood bye\n"]


def test_another_verdict_is_seen_and_other_seconds_are_not():
    shown = "equal: A (torch) and B (Flax), 4 tensors, 17\nruns (4 seeds), 4.6 s\nlargest errors: 3%\n"
    command = "attn-bridge compare a b"
    assert_as_shown(
        command, shown, "equal: A (torch) and B (Flax), 4 tensors, 17 runs (4 seeds), 11 s\nlargest errors: 9%\n"
    )
    with pytest.raises(AssertionError):
        assert_as_shown(command, shown, "equal: A (torch) and B (Flax), 5 tensors, 17 runs (4 seeds), 11 s\n")
