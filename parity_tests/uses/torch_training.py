"""What users of torch do to train attention layers; each function fails if a number is wrong."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close

from .torch_layers import X, layer, slopes
from .torch_programs import USES


@USES.add("weights frozen")
def frozen() -> None:
    module = layer()
    module.W_query.requires_grad_(False)
    module(X).sum().backward()
    assert module.W_query.weight.grad is None
    assert module.W_key.weight.grad is not None


@USES.add("trained by an optimizer")
def trained() -> None:
    module = layer()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        loss = (module(X) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@USES.add("an average of weights (EMA)")
def averaged() -> None:
    average = torch.optim.swa_utils.AveragedModel(layer())
    average.update_parameters(layer())
    assert_close(average(X), layer()(X))


@USES.add("weights as one vector")
def vector() -> None:
    module = layer()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(module.parameters()), module.parameters())
    assert_close(module(X), layer()(X))


@USES.add("weights pruned or parametrised")
def parametrised() -> None:
    module = layer()
    prune.l1_unstructured(module.W_query, "weight", 0.0)
    nn.utils.parametrizations.weight_norm(module.W_key)
    assert_close(module(X), layer()(X), rtol=1e-4, atol=1e-5)


@USES.add("dropout in training alone")
def dropout() -> None:
    module = layer()
    assert_close(module(X), module(X))
    module.train()
    assert (module(X) - module(X)).abs().max() > 1e-3


@USES.add("dropout drawn again from a seed")
def seeded() -> None:
    module = layer().train()
    found = [(torch.manual_seed(3), module(X))[1] for _ in range(2)]
    assert_close(*found)


@USES.add("NaN looked for")
def anomalies() -> None:
    with torch.autograd.set_detect_anomaly(True):
        slopes(layer())


@USES.add("trained in mixed precision (GradScaler)")
def scaled() -> None:
    module, scaler = layer(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        before = (module(X) ** 2).sum()
    scaler.scale(before).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (module(X) ** 2).sum() < before
