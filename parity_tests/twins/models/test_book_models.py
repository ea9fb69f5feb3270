"""The book's own Llama 3, Qwen 3 and Gemma 3, where they can be imported, against `DecoderModel` and `transformers`.

The package has no Gemma 3 yet; its notebook's cells, saved as ``llms_from_scratch/gemma3.py``, will do.
"""

from __future__ import annotations

import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_attn
import torch_attn
from attn_bridge import checkpoints
from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import to_numpy

from ...support.models import originals
from ...support.models.decoder_oracle import make
from ..families.test_originals import BOOK_GEMMA, BOOK_LLAMA, BOOK_MOE, BOOK_QWEN, CASES, IDS

BOOKS = {
    "the book's llama 3": ("llama3", "Llama3Model", BOOK_LLAMA),
    "the book's qwen 3": ("qwen3", "Qwen3Model", BOOK_QWEN),
    "the book's qwen 3 with experts": ("qwen3", "Qwen3Model", BOOK_MOE),
    "the book's gemma 3": ("gemma3", "Gemma3Model", BOOK_GEMMA),
}

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("name", BOOKS)
def test_the_books_own_class_gives_the_same_logits(tmp_path, name):
    module, kind, config = BOOKS[name]
    package = pytest.importorskip(f"llms_from_scratch.{module}", exc_type=ImportError)
    model_type, sizes, _, _ = CASES[name]
    with promoted(), torch.no_grad():
        theirs = make(model_type, sizes)
        wanted = to_numpy(theirs(torch.tensor(IDS), use_cache=False).logits)
    theirs.save_pretrained(tmp_path / "hf")
    layout = f"book-{module}"
    folder = checkpoints.convert(tmp_path / "hf", tmp_path / "book", to_layout=layout, settings={"tie": 0}).target
    state = originals.state_of(folder)
    with promoted(), torch.no_grad():
        book = getattr(package, kind)({"rope_freq": None, **config, "dtype": torch.float64})
        book.load_state_dict(state, strict=True, assign=True)  # the experts are made without memory
        found = to_numpy(book(torch.tensor(IDS)))
    assert np.abs(found - wanted).max() <= 1e-10 * np.abs(wanted).max()
    (tmp_path / "own").mkdir()
    torch.save(book.state_dict(), tmp_path / "own" / "model.pth")
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    ours = torch_attn.DecoderModel.from_pretrained(tmp_path / "own")
    flax = jax_attn.DecoderModel.from_pretrained(tmp_path / "own")
    with torch.no_grad():
        both = to_numpy(ours(torch.tensor(IDS))), np.asarray(flax(jnp.asarray(IDS)))
    for logits in both:
        assert np.abs(logits - found).max() <= 1e-10 * np.abs(found).max()


@pytest.mark.parametrize("name", [name for name in BOOKS if name != "the book's qwen 3"])  # whose names are ours
def test_the_names_recorded_are_those_of_the_class(name):
    module, kind, config = BOOKS[name]
    package = pytest.importorskip(f"llms_from_scratch.{module}", exc_type=ImportError)
    recorded = importlib.import_module("parity_tests.neutral.checkpoints.layouts.test_originals")
    sizes = {"emb_dim": 16, "head_dim": 6, "num_experts": 3, "moe_intermediate_size": 5, "n_layers": 2}
    own = {**config, **{key: size for key, size in sizes.items() if key in config or key in ("emb_dim", "n_layers")}}
    own |= {"dtype": torch.float32, **({"layer_types": config["layer_types"][:2]} if "layer_types" in config else {})}
    held = getattr(package, kind)({"rope_freq": None, **own}).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in held.items()}
    assert shapes == {key: array.shape for key, array in recorded.drawn(f"book-{module}").items()}
