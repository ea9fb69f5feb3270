"""Tables of positions under torch.compile: it traces NumPy as torch, whose quotient of whole numbers is float32."""

import pytest
import torch

from attn_bridge.specs import (
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    RelativeBias,
    Rotary,
    YaRNScaling,
)
from torch_attn.positions import alibi_bias, relative_bias, relative_buckets, rotary_tables

SCALINGS = {
    "none": None,
    "linear": LinearScaling(3.0),
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 64),
    "ntk": NTKScaling(3.3),
    "dynamic ntk": NTKScaling(3.3, 8),
    "longrope": LongRoPEScaling((1.0, 1.1, 1.2, 1.4, 1.5, 1.7, 1.8, 2.0), (2.0, 2.5, 3, 4, 5, 6, 7, 9), 8, 2.0),
    "yarn": YaRNScaling(4.0, 64),
    "yarn, not truncated": YaRNScaling(4.0, 64, truncate=False, mscale=0.7, mscale_all_dim=0.5),
}


@pytest.fixture(autouse=True)
def _compile_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("backend", "name"),
    [*(("aot_eager", name) for name in SCALINGS), ("inductor", "ntk"), ("inductor", "dynamic ntk")],
)
def test_compiled_rotary_tables_are_the_eager_ones_in_float64(backend, name):
    def tables(positions):
        return rotary_tables(Rotary(scaling=SCALINGS[name]), positions, 16, torch.float64)

    positions = torch.arange(13)  # beyond the original context of the dynamic one
    compiled = torch.compile(tables, fullgraph=True, backend=backend)
    for found, want in zip(compiled(positions), tables(positions), strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-14)  # torch's powers are not NumPy's to the last bit


@pytest.mark.parametrize("layout", ["sections", "interleaved", "axial", "strided"])
def test_compiled_tables_of_rows_are_the_eager_ones_in_float64(layout):
    scaling = NTKScaling(3.3, 8) if layout == "sections" else None

    def tables(positions):
        return rotary_tables(Rotary(scaling=scaling, axes=(4, 4), layout=layout), positions, 16, torch.float64)

    positions = torch.stack([torch.arange(13), torch.arange(13).flip(0) * 2])[:, None]
    compiled = torch.compile(tables, fullgraph=True, backend="aot_eager")
    for found, want in zip(compiled(positions), tables(positions), strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_heads", [4, 6])
def test_compiled_alibi_is_the_eager_one_in_float64(num_heads):
    def bias(positions):
        return alibi_bias(num_heads, positions, positions, torch.float64)

    positions = torch.arange(13)
    found = torch.compile(bias, fullgraph=True, backend="aot_eager")(positions)
    torch.testing.assert_close(found, bias(positions), rtol=0, atol=0)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_compiled_relative_bias_is_the_eager_one_in_float64(bidirectional):
    def bias(table, positions):
        buckets = relative_buckets(RelativeBias(10, 8, bidirectional), positions, positions)
        return relative_bias(table, buckets, torch.float64)

    table, positions = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(13)
    found = torch.compile(bias, fullgraph=True, backend="aot_eager")(table, positions)
    torch.testing.assert_close(found, bias(table, positions), rtol=0, atol=0)
