"""The house itself: one variant in four places, twins with one outline, and who may import whom."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attn_bridge import specs

from ..support.calls.bad_calls import BAD_CALLS

ROOT = Path(__file__).parents[2]
JAX, TORCH = ROOT / "jax_attn", ROOT / "torch_attn"

ONLY_JAX = {"linear.py", "decoding/running.py"}
ONLY_TORCH = {"checkpoints/book.py", "checkpoints/undrawn.py", "threefry.py"}
ONLY_TORCH |= {"shards.py", "checkpoints/shared_weights.py", "recomputation.py", "decoding/trees.py"}
ONLY_TORCH |= {"decoding/rollback.py"}
"""Files without a twin: torch's initial weights for Flax, checks that wait for a jit to run; the mask buffers in the
book's checkpoints, modules for which nothing is drawn, Flax's random bits for torch, what a `DTensor` is put together
by, draws that are repeated when activations are recomputed, which JAX does itself, caches as trees, which Flax's
are, and caches of calls that failed, which Flax's calls do not write to."""

JAX_ARGUMENTS, TORCH_ARGUMENTS = {"rngs", "param_dtype", "dtype", "device", "layers"}, {"rngs", "device", "dtype"}
"""Arguments that may stand on one side alone."""

JAX_ATTRIBUTES: frozenset[str] = frozenset({"dtype"})
"""Attributes that may stand on one side alone: Flax modules keep the dtype of their computation."""

SAME_METHOD = {"__call__": "forward"}
EINOPS = {"rearrange", "reduce", "repeat", "einsum"}
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "optax", "orbax"}


# ---- one variant, one name, four places


@pytest.mark.parametrize("variant", specs.VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("place", ["attn_bridge/specs", "jax_attn", "torch_attn", "attn_bridge/reference"])
def test_every_variant_has_its_file_in_every_place(variant, place):
    assert (ROOT / place / f"{variant.file}.py").is_file()


@pytest.mark.parametrize("variant", specs.VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("package", [JAX, TORCH], ids=lambda path: path.name)
def test_every_variant_is_exported_from_its_file(variant, package):
    tree = ast.parse((package / f"{variant.file}.py").read_text())
    kind = ast.FunctionDef if variant.is_function else ast.ClassDef
    assert variant.name in [node.name for node in tree.body if isinstance(node, kind)]
    assert {variant.name, *variant.aliases} <= set(public_names(package))


def test_both_packages_offer_the_same_names():
    assert public_names(JAX) == public_names(TORCH)


def public_names(package: Path) -> list[str]:
    """Return the literal ``__all__`` of a package, without importing it."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{package.name} has no __all__")


def test_every_bad_call_has_an_id_of_its_own():
    assert len({row.id for row in BAD_CALLS}) == len(BAD_CALLS)


# ---- twins


@dataclasses.dataclass
class Outline(ast.NodeVisitor):
    """Collects, in order, one line per class, public function, argument, public attribute and einops string."""

    arguments: set[str]
    attributes: frozenset[str]
    lines: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, source: str, arguments: set[str], attributes: frozenset[str] = frozenset()) -> list[str]:
        """Return the lines of a source text, leaving out `arguments` and `attributes`."""
        outline = cls(arguments, attributes)
        outline.visit(ast.parse(source))
        return outline.lines

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Write down a public class and what is in it."""
        if not is_private(node.name):
            self.lines.append(f"class {node.name}")
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Write down a public function with its arguments and their defaults, and what is in it."""
        if is_private(node.name):
            return
        signature = node.args
        positional = [*signature.posonlyargs, *signature.args]
        defaults = [None] * (len(positional) - len(signature.defaults)) + list(signature.defaults)
        pairs = [
            *zip(positional, defaults, strict=True),
            *([(signature.vararg, None)] if signature.vararg else []),
            *zip(signature.kwonlyargs, signature.kw_defaults, strict=True),
            *([(signature.kwarg, None)] if signature.kwarg else []),
        ]
        shown = [
            f"{argument.arg}={ast.unparse(default)}" if default else argument.arg
            for argument, default in pairs
            if argument.arg not in self.arguments
        ]
        self.lines.append(f"def {SAME_METHOD.get(node.name, node.name)}({', '.join(shown)})")
        for statement in node.body:
            self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Write down a public attribute that is assigned on self."""
        stored_on_self = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        if stored_on_self and not is_private(node.attr) and node.attr not in self.attributes:
            self.lines.append(f"self.{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Write down the patterns of einops."""
        if ast.unparse(node.func).rpartition(".")[2] in EINOPS:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            self.lines += [f"einops {text!r}" for text in texts]
        self.generic_visit(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def compare_outlines(jax_source: str, torch_source: str) -> list[str]:
    """Return the differing lines of two twins' outlines: ``-`` only in JAX, ``+`` only in torch."""
    ours = Outline.of(jax_source, JAX_ARGUMENTS, JAX_ATTRIBUTES)
    theirs = Outline.of(torch_source, TORCH_ARGUMENTS)
    found = difflib.unified_diff(ours, theirs, lineterm="", n=0)
    return [line for line in found if not line.startswith(("---", "+++", "@@"))]


def files(package: Path) -> set[str]:
    return {path.relative_to(package).as_posix() for path in package.rglob("*.py")}


NAMESAKES = {"compat.py", "layer.py", "random.py"}
"""Files of one name that are no twins: `compat` has the arguments of its framework's layer, `layer` the features that
its framework's modules have, and `random` gives its framework the random numbers of the other."""

FREE = ("implementations/", "operations/", "parallel/")
"""Rooms free of the twin rule: kernels of attention, what a framework does slowly by itself, and what devices do."""

TWINS = sorted(
    name
    for name in (files(JAX) & files(TORCH)) - NAMESAKES
    if not name.startswith("parallel/") or name == "parallel/parallelize.py"
)


def without_free(names: set[str]) -> set[str]:
    """Leave out the rooms where a file needs no twin."""
    return {name for name in names if not name.startswith(FREE)}


def test_every_file_has_its_twin():
    assert without_free(files(JAX) - files(TORCH)) == ONLY_JAX
    assert without_free(files(TORCH) - files(JAX)) == ONLY_TORCH


@pytest.mark.parametrize("file", TWINS)
def test_twins_have_the_same_outline(file):
    assert compare_outlines((JAX / file).read_text(), (TORCH / file).read_text()) == []


def equal_lines(jax_source: str, torch_source: str) -> tuple[int, int]:
    """Return how many lines of two twins are the same, counted in both, and how many there are."""
    ours, theirs = jax_source.splitlines(), torch_source.splitlines()
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return 2 * sum(block.size for block in blocks), len(ours) + len(theirs)


def test_variants_and_models_share_82_percent_of_their_lines():
    names = sorted({f"{variant.file}.py" for variant in specs.VARIANTS} | {"bert_encoder.py", "gpt_model.py"})
    counts = {name: equal_lines((JAX / name).read_text(), (TORCH / name).read_text()) for name in names}
    equal, lines = (sum(column) for column in zip(*counts.values(), strict=True))
    assert round(100 * equal / lines) >= 82, {name: round(same / total, 2) for name, (same, total) in counts.items()}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [("a\nb", "a\nb", (4, 4)), ("a\nb\nc", "a\nx\nc", (4, 6)), ("a\nb", "b\na", (2, 4)), ("a\n" * 300, "a", (2, 301))],
)
def test_equal_lines_are_counted_in_both_twins(ours, theirs, expected):
    assert equal_lines(ours, theirs) == expected


@pytest.mark.parametrize("variant", specs.VARIANTS, ids=lambda variant: variant.name)
def test_the_outline_of_a_variant_is_not_empty(variant):
    outline = Outline.of((TORCH / f"{variant.file}.py").read_text(), TORCH_ARGUMENTS)
    assert any(line.startswith(("class", "def")) and variant.name in line for line in outline)


SIZES = "self, d_in, d_out, context_length"

DRIFTS = {
    "argument renamed": (
        "attention_mask: AttentionMask",
        "padding_mask: AttentionMask",
        [
            "-def forward(self, x, _misplaced, attention_mask=None, return_weights=False)",
            "+def forward(self, x, _misplaced, padding_mask=None, return_weights=False)",
        ],
    ),
    "attribute renamed": ("self.out_proj = ", "self.proj = ", ["-self.out_proj", "+self.proj"]),
    "einops string changed": (
        '"b t h c -> b t (h c)"',
        '"b t h c -> b t (c h)"',
        ["-einops 'b t h c -> b t (h c)'", "+einops 'b t h c -> b t (c h)'"],
    ),
    "class renamed": (
        "class MultiHeadAttention(",
        "class MultiheadAttention(",
        ["-class MultiHeadAttention", "+class MultiheadAttention"],
    ),
    "default changed": (
        "dropout: float = 0.0",
        "dropout: float = 0.1",
        [
            f"-def __init__({SIZES}, dropout=0.0, num_heads=1, qkv_bias=False, implementation=None)",
            f"+def __init__({SIZES}, dropout=0.1, num_heads=1, qkv_bias=False, implementation=None)",
        ],
    ),
    "argument added": (
        "qkv_bias: bool = False,",
        "qkv_bias: bool = False, rope: bool = True,",
        [
            f"-def __init__({SIZES}, dropout=0.0, num_heads=1, qkv_bias=False, implementation=None)",
            f"+def __init__({SIZES}, dropout=0.0, num_heads=1, qkv_bias=False, rope=True, implementation=None)",
        ],
    ),
    "method added": ("    def forward(", "    def scores(self): ...\n\n    def forward(", ["+def scores(self)"]),
}
"""What to replace in the torch twin of MultiHeadAttention, by what, and the lines that must be found."""


@pytest.mark.parametrize("label", DRIFTS)
def test_a_planted_drift_is_found(label):
    old, new, expected = DRIFTS[label]
    ours, theirs = ((package / "multi_head_attention.py").read_text() for package in (JAX, TORCH))
    assert old in theirs
    assert compare_outlines(ours, theirs.replace(old, new, 1)) == expected


def test_attributes_in_another_order_are_found():
    ours, theirs = ((package / "multi_head_attention.py").read_text() for package in (JAX, TORCH))
    swapped = theirs.replace("self.W_query = ", "self.X = ").replace("self.W_key = ", "self.W_query = ")
    assert compare_outlines(ours, swapped.replace("self.X = ", "self.W_key = ")) != []


# ---- who imports whom


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


TRUNK = sorted(
    f"attn_parity/{path.name}"
    for path in (ROOT / "attn_parity").iterdir()
    if path.is_dir() and path.name not in ("frameworks", "__pycache__")
)
"""Rooms of the judge that know no framework."""

FORBIDDEN = {
    "attn_bridge": FRAMEWORKS | {"torch_attn", "jax_attn", "parity_tests"},
    "jax_attn": {"torch", "torch_attn", "attn_parity", "parity_tests"},
    "torch_attn": FRAMEWORKS - {"torch"} | {"jax_attn", "attn_parity", "parity_tests"},
    "attn_bridge/reference": FRAMEWORKS | {"torch_attn", "jax_attn"},
    "attn_parity/frameworks/jax": {"torch", "torch_attn", "parity_tests"},
    "attn_parity/frameworks/torch": FRAMEWORKS - {"torch"} | {"jax_attn", "parity_tests"},
    **dict.fromkeys(TRUNK, FRAMEWORKS | {"torch_attn", "jax_attn", "fault_lab", "parity_tests"}),
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_file_imports_what_it_must_not(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    assert {
        str(path): imported(path) & FORBIDDEN[package] for path in paths if imported(path) & FORBIDDEN[package]
    } == {}


def run_python(*arguments: str, blocked: set[str] = FRAMEWORKS) -> subprocess.CompletedProcess[str]:
    """Run Python with `blocked` packages unimportable; it reports which frameworks were loaded, on the last line."""
    program = f"""
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(blocked)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv = {list(arguments)!r}
try:
    if sys.argv[0] == "-c":
        exec(sys.argv[1])
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print(sorted({{name.partition(".")[0] for name in sys.modules}} & set({sorted(FRAMEWORKS)!r})))
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("blocked", [FRAMEWORKS, set()], ids=["frameworks blocked", "frameworks at hand"])
def test_the_base_and_all_it_offers_import_no_framework(blocked):
    program = "import attn_bridge; [getattr(attn_bridge, name) for name in attn_bridge.__all__]"
    done = run_python("-c", program, blocked=blocked)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("blocked", [FRAMEWORKS, set()], ids=["frameworks blocked", "frameworks at hand"])
def test_the_help_of_the_command_imports_no_framework(blocked):
    done = run_python("attn_bridge", "--help", blocked=blocked)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_weights_of_numpy_arrays_need_no_framework():
    program = """
import numpy, attn_bridge
rules = attn_bridge.specs.CausalAttentionConfig(3, 2, 6).rules()
print(*attn_bridge.torch_to_flax({f"{n}.weight": numpy.ones((2, 3)) for n in ("W_query", "W_key", "W_value")}, rules))
"""
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "W_query.kernel W_key.kernel W_value.kernel\n[]\n"


@pytest.mark.parametrize(("framework", "module", "extra"), [("torch", "torch", "torch"), ("flax", "flax", "jax")])
def test_a_missing_framework_is_one_line_that_names_the_extra(framework, module, extra):
    program = f"""
from attn_bridge import MissingBackendError, backends
try:
    backends.load({framework!r})
except MissingBackendError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    done = run_python("-c", program, blocked={module})
    assert (done.returncode, done.stderr) == (0, "")
    line = done.stdout.splitlines()[0]
    assert line.startswith(f"the {framework} backend cannot be imported (")
    assert line.endswith(f"; install it with: pip install 'attn-bridge[{extra}]'")
    assert len(done.stdout.splitlines()) == 2


def test_an_unknown_name_of_the_base_is_an_attribute_error():
    done = run_python("-c", "import attn_bridge\ntry: attn_bridge.nonsense\nexcept AttributeError as e: print(e)")
    assert done.stdout == "module 'attn_bridge' has no attribute 'nonsense'\n[]\n"


def test_what_the_commands_of_the_readme_write_is_ignored():
    written = re.findall(r"^wrote ([^:\s]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert written == ["demo", "gpt2-flax", "gpt2-again"]
    assert {f"/{name}/" for name in written} <= set((ROOT / ".gitignore").read_text(encoding="utf-8").splitlines())


WITH_ROOMS = ("attn_bridge", "attn_kernels", "attn_parity", "jax_attn", "torch_attn")
README_FILES = sorted(path for package in WITH_ROOMS for path in (ROOT / package).rglob("README.md"))


@pytest.mark.parametrize("path", README_FILES, ids=lambda path: path.parent.name)
def test_the_page_of_a_room_is_short_and_names_files_that_exist(path):
    text = path.read_text(encoding="utf-8")
    assert 10 <= len(text.splitlines()) <= 30
    assert all(f"| {row} |" in text for row in ("in", "out", "called by", "imports"))
    words = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    homes = [path.parent, *path.parents[1:3], *path.parent.iterdir()]  # a file of the room, of a package, or of a part
    assert [word for word in words if not any((home / word).exists() for home in (*homes, ROOT))] == []
