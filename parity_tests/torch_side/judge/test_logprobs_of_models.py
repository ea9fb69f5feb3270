"""Log-probabilities of a tiny model in float32 against bfloat16, right and with one thing changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_bridge import parity
from attn_parity.frameworks.torch.probes.rounding import Rounding

IDS = np.random.default_rng(0).integers(0, 40, size=(3, 20))


class Tiny(nn.Module):
    def __init__(self, diagonal=1, temperature=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 32)
        layer = {"batch_first": True, "dropout": 0.0}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, **layer) for _ in range(2))
        self.head = nn.Linear(32, 40)
        self.diagonal, self.temperature = diagonal, temperature
        self.eval()

    def forward(self, ids):
        x = self.embed(ids)
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), self.diagonal)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x) / self.temperature


def with_one_weight():
    model = Tiny()
    with torch.no_grad():
        model.blocks[1].linear1.weight[3, 5] += 2.0
    return model


def test_bfloat16_of_the_same_model_is_explained():
    model = Tiny()
    report = parity.logprobs(model, Tiny().bfloat16(), tokens=IDS)
    assert (report.verdict, report.count, report.beyond, report.explained) == ("equal", 57, [], 1.0)
    assert 1e-4 < report.gap < report.noise
    assert model.embed.weight.dtype == torch.float32
    assert parity.logprobs(model, model, tokens=IDS).gap == 0.0


@pytest.mark.parametrize("make", [with_one_weight, lambda: Tiny(diagonal=2), lambda: Tiny(temperature=1.1)])
def test_one_change_is_named(make):
    report = parity.logprobs(Tiny(), make().bfloat16(), tokens=IDS)
    assert report.verdict == "different"
    assert report.beyond
    assert report.explained < 0.5


class Overflowing(Tiny):
    def forward(self, ids):
        logits = super().forward(ids)
        return torch.where(logits == logits[:, 7:8, 3:4], float("nan"), logits)


def test_a_model_that_computes_nan_is_different_from_the_first_such_token_on():
    report = parity.logprobs(Tiny(), Overflowing(), tokens=IDS)
    assert report.verdict == "different"
    assert [(one.sequence, one.position) for one in report.beyond] == [(0, 8), (1, 8), (2, 8)]
    assert all(np.isnan(one.second) for one in report.beyond)


def test_a_file_gives_the_tokens_of_a_model(tmp_path):
    with torch.no_grad():
        scores = torch.log_softmax(Tiny()(torch.from_numpy(IDS)), -1)[:, :-1]
    own = torch.gather(scores, -1, torch.from_numpy(IDS)[:, 1:, None])[..., 0].numpy()
    np.savez(tmp_path / "sampler.npz", tokens=IDS, logprobs=np.pad(own, ((0, 0), (1, 0)), constant_values=np.nan))
    report = parity.logprobs(tmp_path / "sampler.npz", Tiny())
    assert report.verdict == "equal"
    assert report.gap < 1e-5


def test_refusals():
    with pytest.raises(ValueError, match=r"^a model needs token ids: give tokens, or a file with tokens on the other"):
        parity.logprobs(Tiny(), Tiny())
    with pytest.raises(
        ValueError, match=r"^a model must return logits \[1, 20, n\] for ids \[1, 20\], it gives \[\[1, 20\]\]$"
    ):
        parity.logprobs(nn.Flatten(), Tiny(), tokens=IDS)


class Mixture(nn.Module):
    """A residual layer of experts, which sorts its tokens and counts those of each expert by `histc`."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 6)

    def forward(self, x):
        tokens = x.reshape(-1, 32)
        gates, chosen = self.router(tokens).float().softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.histc(chosen.float(), bins=4, min=0, max=3).long().tolist()
        parts = tokens[order].split([*counts[:3], len(order) - sum(counts[:3])])
        out = torch.cat([part @ expert for part, expert in zip(parts, self.experts, strict=True)])
        return x + (gates[:, None].to(x) * out[order.argsort()]).view_as(x)


class TinyMixture(Tiny):
    def __init__(self, seed, fault=""):
        super().__init__(temperature=1.1 if fault == "temperature" else 1.0)
        torch.manual_seed(seed)
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))
        if fault == "weight":
            with torch.no_grad():
                self.blocks[0].linear1.weight[3, 5] += 2.0

    def forward(self, ids):
        x = self.embed(ids)
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), self.diagonal)
        for block, mixture in zip(self.blocks, self.mixtures, strict=True):
            x = mixture(block(x, src_mask=mask))
        return self.head(x) / self.temperature


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fault", "verdict"), [("", "equal"), ("weight", "different"), ("temperature", "different")])
def test_rounding_of_a_mixture_hides_no_fault(seed, fault, verdict):
    report = parity.logprobs(TinyMixture(seed), TinyMixture(seed, fault).bfloat16(), tokens=IDS)
    assert report.verdict == verdict
    assert report.noise < 0.1


def test_random_rounding_leaves_counts_alone():
    counts = torch.full((9,), 3.0)
    with Rounding(0, True):
        assert torch.histc(torch.arange(9.0), bins=3, min=0, max=8).tolist() == [3.0] * 3
        assert torch.equal(torch.trunc(counts), counts)
        assert torch.equal(torch.floor_divide(counts, 1.0), counts)
        assert not torch.equal(counts * 1.0, counts)
