"""Pairs with JAX packages of others, run where these are importable.

DeepMind's recurrentgemma and Haiku, flaxmodels, Equinox, Keras. Tiny random configurations against torch's own layers,
or the package's torch twin. A fault is a line of the package's own source that is changed (`changed`), or a setting.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from .gallery import Case, entry, fault, inside
from .weights import carry, fresh, held, linen, numbers, rules

WIDTH, HIDDEN, HEADS = 16, 24, 4
B, T = 2, 7

_NUMBERS = itertools.count()


def changed(name: str, *lines: tuple[str, str], **members: Any) -> Any:
    """Return a copy of a module with some of its source replaced, and with other members; as it is without any."""
    if not lines and not members:
        return importlib.import_module(name)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for old, new in lines:
        assert old in source, f"{name} has no {old!r}"
        source = source.replace(old, new, 1)
    module = types.ModuleType(f"{name}_{next(_NUMBERS)}")
    module.__package__, module.__file__ = name.rpartition(".")[0], spec.origin
    sys.modules[module.__name__] = module
    exec(compile(source, module.__name__, "exec"), vars(module))
    vars(module).update(members)
    return module


def line(faults: dict[str, tuple[str, str]], wrong: str | None) -> list[tuple[str, str]]:
    """Return the line that a fault changes, if it is one of those."""
    return [faults[wrong]] if wrong in faults else []


RG_LRU = {
    "gates-exchanged": ("log_a = -8.0 * gate_a *", "gate_a, gate_x = gate_x, gate_a\n    log_a = -8.0 * gate_a *"),
    "document-start-not-reset": ("a=a * (1 - reset[..., None])", "a=a"),
    "decay-not-squared": ("complex_lib.exp(log_a), complex_lib.exp(2 * log_a)", "(complex_lib.exp(log_a),) * 2"),
    "gradient-of-the-root-cut": (
        "sqrt_bound_derivative(1 - a_squared, 1000)",
        "sqrt_bound_derivative(1 - a_squared, 0.4)",
    ),
}


@entry(
    "recurrentgemma",
    "Linen",
    "RG-LRU",
    "packed",
    needs=("recurrentgemma", "typeguard"),
    faults={
        **{name: fault(*inside("", "input_gate", "a_gate")) for name in list(RG_LRU)[:3]},
        "gradient-of-the-root-cut": fault(*inside("", "input_gate", "a_gate"), direction="backward"),
    },
)
def outside_recurrentgemma_lru(wrong: str | None) -> Case:
    """The real-gated linear unit of torch against its Linen twin, with packed documents."""
    from recurrentgemma import common
    from recurrentgemma.torch import layers as torch_layers

    layers = changed("recurrentgemma.jax.layers", *line(RG_LRU, wrong))
    positions = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]], np.int32)
    inputs = {"x": numbers(2, 8, WIDTH), "segment_pos": positions}
    first = fresh(torch_layers.RGLRU(WIDTH, HEADS))
    second = layers.RGLRU(WIDTH, HEADS, scan_type=common.ScanType.LINEAR_NATIVE)
    return Case(first, linen(second, held(first), **inputs), inputs)


RESNET = {
    "relu-missing": ("        x += residual\n        x = nn.relu(x)", "        x += residual\n"),
    "padding-same": ("padding=((1, 1), (1, 1)),", "padding='SAME',"),
    "keras-eps": ("epsilon=1e-05", "epsilon=1e-03"),
}


@entry(
    "flaxmodels",
    "ResNet",
    "Linen",
    "BatchNorm",
    needs=("flaxmodels", "h5py"),
    faults={
        "relu-missing": fault("", ("downsample.1", ""), ("relu", "")),
        "padding-same": fault("conv1"),
        "keras-eps": fault("bn1"),
    },
)
def outside_flaxmodels_resnet(wrong: str | None) -> Case:
    """Pair a basic block as torchvision has it with that of flaxmodels, which halves the image."""
    from flax import linen as fnn
    from torch import nn

    resnet = changed("flaxmodels.resnet.resnet", *line(RESNET, wrong))
    channels, features = 4, 8

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(channels, features, 3, 2, 1, bias=False), nn.BatchNorm2d(features)
            self.conv2, self.bn2 = nn.Conv2d(features, features, 3, 1, 1, bias=False), nn.BatchNorm2d(features)
            halved = nn.Conv2d(channels, features, 1, 2, bias=False)
            self.downsample, self.relu = nn.Sequential(halved, nn.BatchNorm2d(features)), nn.ReLU()

        def forward(self, x):
            hidden = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return self.relu(hidden + self.downsample(x))

    class Linen(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            block = resnet.BasicBlock(features, downsample=True, block_name="b", name="block")
            return block(x.transpose(0, 2, 3, 1), {}, train=False).transpose(0, 3, 1, 2)

    first, image = fresh(Torch()), numbers(2, channels, 8, 8)
    rows = []
    for i, (conv, norm) in enumerate((("conv1", "bn1"), ("conv2", "bn2"), ("downsample.0", "downsample.1"))):
        rows.append(f"{conv}.weight | block.Conv_{i}.kernel | o i y x -> y x i o")
        words = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
        rows += [f"{norm}.{word} | block.BatchNorm_{i}.{other}" for word, other in words.items()]
    return Case(first, linen(Linen(), carry(held(first), rules("\n".join(rows))), image), image)


@entry(
    "equinox",
    "function",
    needs=("equinox",),
    faults={"mask-missing": fault("*"), "heads": fault("*"), "scores-not-scaled": fault("*")},
)
def outside_equinox_attention(wrong: str | None) -> Case:
    """``MultiheadAttention`` of torch, causal, against Equinox's, which takes one sequence."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import torch
    from torch import nn

    from attn_bridge import parity

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)

        def forward(self, x):
            hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
            return self.attention(x, x, x, attn_mask=hidden, need_weights=False)[0]

    first = fresh(Torch())
    heads = 2 if wrong == "heads" else HEADS
    made = eqx.nn.MultiheadAttention(heads, WIDTH, key=jax.random.key(0))
    own = held(first)
    query, key, value = np.split(own["attention.in_proj_weight"], 3)
    weights = {"query": query, "key": key, "value": value, "output": own["attention.out_proj.weight"]}

    def attend(weights, x):
        attention = made
        for name, array in weights.items():
            attention = eqx.tree_at(lambda tree, name=name: getattr(tree, f"{name}_proj").weight, attention, array)
        mask = None if wrong == "mask-missing" else jnp.tril(jnp.ones((T, T), bool))
        times = (WIDTH / HEADS) ** 0.5 if wrong == "scores-not-scaled" else 1.0
        return jax.vmap(lambda one: attention(one * times, one, one, mask=mask))(x)

    return Case(first, parity.function(attend, jax.tree.map(jnp.asarray, weights)), numbers(B, T, WIDTH))


@entry(
    "haiku",
    "function",
    "LSTM",
    needs=("haiku", "jmp", "tabulate"),
    faults={"forget-gate-plain": fault("*"), "gates-in-torchs-order": fault("*"), "backwards": fault("*")},
)
def outside_haiku_lstm(wrong: str | None) -> Case:
    """An LSTM by hand, as Haiku has it (gates i g f o, 1 added to the forget gate), against Haiku's."""
    import haiku as hk
    import jax
    import torch
    from torch import nn

    from attn_bridge import parity

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH + HIDDEN, 4 * HIDDEN)

        def forward(self, x):
            h = c = x.new_zeros(x.shape[0], HIDDEN)
            out = []
            for step in range(x.shape[1]):
                i, g, f, o = self.linear(torch.cat([x[:, step], h], -1)).chunk(4, -1)
                if wrong == "gates-in-torchs-order":
                    f, g = g, f
                forget = 0.0 if wrong == "forget-gate-plain" else 1.0
                c = torch.sigmoid(f + forget) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                out.append(h)
            return torch.stack(out, 1)

    def unroll(x):
        core = hk.LSTM(HIDDEN)
        found, _ = hk.dynamic_unroll(
            core, x, core.initial_state(x.shape[0]), time_major=False, reverse=wrong == "backwards"
        )
        return found

    net = hk.without_apply_rng(hk.transform(unroll))
    first, x = fresh(Torch()), numbers(B, T, WIDTH)
    shapes = jax.eval_shape(net.init, jax.random.key(0), x)
    own = held(first)
    (path,) = shapes
    weights = {path: {"w": own["linear.weight"].T, "b": own["linear.bias"]}}
    return Case(first, parity.function(net.apply, jax.tree.map(jax.numpy.asarray, weights)), x)


@entry(
    "keras",
    "function",
    "float32 only",
    needs=("keras", "optree", "h5py"),
    faults={"epsilon-of-torch": fault("*"), "padding-valid": fault("*"), "pool-of-the-maximum": fault("*")},
)
def outside_keras_convolutions(wrong: str | None) -> Case:
    """Convolutions, a norm and a pool of Keras on its JAX backend, against torch's."""
    import os

    os.environ.setdefault("KERAS_BACKEND", "jax")
    import jax.numpy as jnp
    import keras
    from torch import nn

    from attn_bridge import parity

    channels, features = 3, 8

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, features, 3, padding=1)
            self.norm = nn.LayerNorm(features, eps=1e-3)
            self.head = nn.Linear(features, 5)

        def forward(self, image):
            hidden = self.norm(self.conv(image).permute(0, 2, 3, 1)).relu()
            return self.head(hidden.mean((1, 2)))

    layers = [
        keras.layers.Conv2D(features, 3, padding="valid" if wrong == "padding-valid" else "same"),
        keras.layers.LayerNormalization(epsilon=1e-5 if wrong == "epsilon-of-torch" else 1e-3),
        keras.layers.ReLU(),
        keras.layers.GlobalMaxPooling2D() if wrong == "pool-of-the-maximum" else keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(5),
    ]
    model = keras.Sequential([keras.Input((8, 8, channels)), *layers])
    first, image = fresh(Torch()), numbers(2, channels, 8, 8)
    last = image.transpose(0, 2, 3, 1)
    own = held(first)
    weights = [
        own["conv.weight"].transpose(2, 3, 1, 0), own["conv.bias"], own["norm.weight"], own["norm.bias"],
        own["head.weight"].T, own["head.bias"],
    ]  # fmt: skip
    names = [f"{one.path}" for one in model.trainable_variables]
    tree = {name: jnp.asarray(array) for name, array in zip(names, weights, strict=True)}

    def run(weights, x):
        return model.stateless_call([weights[name] for name in names], [], x)[0]

    return Case(first, parity.function(run, tree), image, {"second_inputs": last})
