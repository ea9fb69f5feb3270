"""Heat maps of attention weights, of both backends and of arrays: what is drawn, and what is said about it."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from flax import nnx

pytest.importorskip("matplotlib", reason="pip install 'attn-bridge[viz]'")

import jax_attn
import torch_attn
from attn_bridge import specs, transfer, viz

X = np.random.default_rng(0).normal(size=(2, 9, 24)).astype(np.float32)
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "it", "purred"]


def pair(kind="MultiHeadAttention"):
    torch.manual_seed(0)
    if kind == "MultiHeadAttention":
        arguments = (24, 24, 16, 0.5, 4)
    else:
        arguments = (specs.GroupedQueryAttentionConfig(d_in=24, num_heads=4, num_kv_heads=2, head_dim=6),)
    one, two = getattr(torch_attn, kind)(*arguments), getattr(jax_attn, kind)(*arguments, rngs=nnx.Rngs(0))
    transfer(one, two)
    return one, two


@pytest.mark.parametrize("kind", ["MultiHeadAttention", "GroupedQueryAttention"])
def test_both_backends_give_the_weights_of_one_call(kind):
    found = [viz.weights(module, X) for module in pair(kind)]
    assert found[0].shape == found[1].shape == (2, 4, 9, 9)
    np.testing.assert_allclose(*found, atol=1e-6)
    np.testing.assert_allclose(found[0].sum(axis=-1), 1, atol=1e-6)


def test_heatmaps_take_arrays_of_both_frameworks_and_keywords():
    module, twin = pair()
    mask = np.arange(9)[None] < np.array([[9], [5]])
    wanted = viz.weights(module, X, attention_mask=mask)
    assert not wanted[1, :, :5, 5:].any()
    np.testing.assert_allclose(
        viz.weights(twin, torch.from_numpy(X), attention_mask=torch.from_numpy(mask)), wanted, atol=1e-6
    )
    module.double()
    assert viz.weights(module, X).dtype == np.float64


def test_a_picture_shows_each_head_with_its_weights_and_labels():
    module, twin = pair()
    picture = viz.heatmap(module, X, second=twin, heads=[3, 1], batch=1, tokens=WORDS)
    shown = [axis for axis in picture.figure.axes if axis.images]
    assert [axis.get_title() for axis in shown] == [
        f"{name}, head {head}"
        for name in ("MultiHeadAttention (torch)", "MultiHeadAttention (Flax)", "difference")
        for head in (3, 1)
    ]
    weights = viz.weights(module, X)
    np.testing.assert_array_equal(shown[0].images[0].get_array(), weights[1, 3].astype(np.float64))
    np.testing.assert_array_equal(shown[1].images[0].get_array(), weights[1, 1].astype(np.float64))
    assert [label.get_text() for label in shown[0].get_yticklabels()] == WORDS
    assert "The largest difference is" in picture.alt
    own = weights[1, 3].diagonal().mean()
    assert f"head 3: {weights[1, 3].mean(axis=0).max():.2f} on key" in picture.alt
    assert f"{own:.2f} on the query's own position" in picture.alt


def test_weights_alone_need_no_module():
    weights = np.random.default_rng(1).dirichlet(np.ones(5), size=(3, 7))
    picture = viz.heatmap(weights)
    assert picture.alt.startswith("Attention weights of the weights: 3 heads, 7 queries by 5 keys.")
    assert viz.heatmap(weights[0]).rows["the weights"].shape == (1, 7, 5)
    assert viz.heatmap(torch.from_numpy(weights), second=weights + 0.0).rows["difference"].max() == 0


def test_a_difference_of_nothing_has_a_scale_that_says_so():
    weights = np.random.default_rng(1).dirichlet(np.ones(5), size=(1, 7))
    axes = viz.heatmap(weights, second=weights).figure.axes
    drawn = [image.get_clim() for one in axes for image in one.get_images()]
    assert drawn[-1] == (-1.0, 1.0)
    assert "no difference" in [one.get_ylabel() for one in axes]


def test_files_hold_the_text_and_are_the_same_each_time(tmp_path):
    weights = np.random.default_rng(1).dirichlet(np.ones(5), size=(2, 5))
    for kind in ("png", "svg", "pdf"):
        for place in ("one", "two"):
            picture = viz.heatmap(weights, path=tmp_path / f"{place}.{kind}")
        one, two = ((tmp_path / f"{place}.{kind}").read_bytes() for place in ("one", "two"))
        assert one == two
        if kind == "svg":
            assert picture.alt in one.decode()
        if kind == "png":
            assert picture.alt.encode() in texts(one)


def texts(png):
    """Return the texts of a PNG."""
    found, at = b"", 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        found += (
            body if name in (b"tEXt", b"iTXt") else zlib.decompress(body.split(b"\0")[-1]) if name == b"zTXt" else b""
        )
        at += 12 + size
    return found


def test_a_heatmaps_html_has_alt_text_and_both_themes():
    picture = viz.heatmap(np.eye(4), title='<b>"mine"', tokens=["<i>", "$x$", "a\nb", "long" * 9])
    html = picture.to_html()
    assert html == picture._repr_html_()
    assert 'media="(prefers-color-scheme: dark)"' in html
    assert 'alt="&lt;b&gt;&quot;mine&quot;: 1 head, 4 queries by 4 keys.' in html
    assert "<b>" not in html


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_stand_out_from_the_page(theme):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    from attn_bridge.viz.drawing import LOOKS

    look = LOOKS[theme]
    for colour in (look.ink, look.line):
        dark, light = sorted([luminance(colour), luminance(look.page)])
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    axis = viz.heatmap(np.eye(3), theme=theme).figure.axes[0]
    assert axis.title.get_color() == look.ink


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "said"),
    [
        ((np.eye(3), X), {}, TypeError, "x and keywords go with a module, got ndarray"),
        ((torch.nn.Linear(24, 3), X), {}, TypeError, "Linear takes no return_weights"),
        ((torch_attn.SelfAttention_v2(24, 8),), {}, TypeError, "x is needed to call SelfAttention_v2 with"),
        ((np.ones((2, 3, 4, 5)),), {"batch": 2}, ValueError, r"batch \(2\) must be below 2"),
        ((np.ones(3),), {}, ValueError, r"must be \(T, S\), \(H, T, S\) or \(B, H, T, S\), got \(3,\)"),
        ((np.full((3, 3), np.nan),), {}, ValueError, "must be finite"),
        ((np.ones((2, 3, 3)),), {"heads": [2]}, ValueError, r"heads \(\[2\]\) must be 1 to 32 whole numbers from 0"),
        ((np.eye(3),), {"tokens": ["a"]}, ValueError, "tokens has 1 labels for 3 positions"),
        ((np.eye(3),), {"second": np.eye(4)}, ValueError, r"second has weights \(1, 4, 4\); the first has \(1, 3, 3\)"),
        ((np.eye(3),), {"theme": "blue"}, ValueError, r"theme \(blue\) must be one of light, dark"),
        ((np.eye(3),), {"path": "x.gif"}, ValueError, r"path \(x.gif\) must end with .png, .svg, .pdf"),
        ((np.eye(3),), {"path": "absent/x.png"}, ValueError, "absent/x.png cannot be written"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments, options, kind, said):
    with pytest.raises(kind, match=said):
        viz.heatmap(*arguments, **options)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'attn-bridge\[viz\]'"):
        viz.heatmap(np.eye(3))


def test_a_module_is_left_as_it_was():
    module, _ = pair()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    torch.manual_seed(3)
    viz.heatmap(module, X)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert module.training
    assert all(torch.equal(before[name], one) for name, one in module.state_dict().items())
