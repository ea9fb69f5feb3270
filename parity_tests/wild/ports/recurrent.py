"""Recurrent networks: LSTM, GRU, and Griffin's real-gated linear unit (arXiv 2402.19427). b batch, t time, d width."""

from __future__ import annotations

from typing import Any

from ..gallery import Case, entry, fault, inside
from ..weights import carry, fresh, held, linen, numbers, onto, rules

INNER, WIDTH, T = 6, 8, 5


@entry(
    "LSTM",
    "scan",
    faults={
        "gates-in-flax-order": fault("lstm", ""),
        "forget-bias-added": fault("lstm", ""),
        "one-bias-dropped": fault("lstm", ""),
    },
)
def lstm(wrong: str | None) -> Case:
    """``torch.nn.LSTM`` (gates i f g o, two biases) against ``lax.scan`` over fused gates."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(INNER, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    rngs = nnx.Rngs(0)

    class LSTM(nnx.Module):
        def __init__(self) -> None:
            self.ih, self.hh = nnx.Linear(INNER, 4 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)

        def __call__(self, x):
            hh = self.hh.kernel[...]
            bias = 0 * self.hh.bias[...] if wrong == "one-bias-dropped" else self.hh.bias[...]

            def step(carry, x):
                h, c = carry
                i, f, g, o = jnp.split(x + h @ hh + bias, 4, -1)
                if wrong == "gates-in-flax-order":
                    i, f, g, o = i, g, f, o
                f = f + 1.0 if wrong == "forget-bias-added" else f
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            zeros = jnp.zeros((x.shape[0], WIDTH), x.dtype)
            return jax.lax.scan(step, (zeros, zeros), self.ih(x).swapaxes(0, 1))[1].swapaxes(0, 1)

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.lstm, self.head = LSTM(), nnx.Linear(WIDTH, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.lstm(x))

    names = """
    lstm.weight_ih_l0 | lstm.ih.kernel | o d -> d o
    lstm.weight_hh_l0 | lstm.hh.kernel | o d -> d o
    lstm.bias_ih_l0 | lstm.ih.bias
    lstm.bias_hh_l0 | lstm.hh.bias
    head.weight | head.kernel | o d -> d o
    head.bias | head.bias
    """
    first = fresh(Torch())
    return Case(first, onto(first, Port(), names), numbers(2, T, INNER))


def torch_lstm_cell() -> Any:
    """Return an LSTM by hand with a layer per gate, and one bias, as Flax has it."""
    import torch
    from torch import nn

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.ModuleDict({f"i{gate}": nn.Linear(INNER, WIDTH, bias=False) for gate in "ifgo"})
            self.gates.update({f"h{gate}": nn.Linear(WIDTH, WIDTH) for gate in "ifgo"})

        def forward(self, x, h, c):
            i, f, g, o = (self.gates[f"i{gate}"](x) + self.gates[f"h{gate}"](h) for gate in "ifgo")
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c

    class LSTM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, x):
            h = c = x.new_zeros(x.shape[0], WIDTH)
            out = []
            for step in range(x.shape[1]):
                h, c = self.cell(x[:, step], h, c)
                out.append(h)
            return torch.stack(out, 1)

    return fresh(LSTM())


@entry(
    "LSTM",
    "Linen",
    faults={"candidate-by-sigmoid": fault("cell", ""), "cell-state-given-out": fault("", "cell")},
)
def lstm_cell_linen(wrong: str | None) -> Case:
    """Pair a cell by hand against Linen's ``OptimizedLSTMCell``: eight square or equal-shaped matrices."""
    import jax.numpy as jnp
    from flax import linen as fnn

    class Port(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            act = {"activation_fn": fnn.sigmoid} if wrong == "candidate-by-sigmoid" else {}
            cell = fnn.OptimizedLSTMCell(WIDTH, name="cell", **act)
            state = (jnp.zeros((x.shape[0], WIDTH), x.dtype),) * 2
            out = []
            for step in range(x.shape[1]):
                state, h = cell(state, x[:, step])
                out.append(state[0] if wrong == "cell-state-given-out" else h)
            return jnp.stack(out, 1)

    first, inputs = torch_lstm_cell(), numbers(2, T, INNER)
    names = """
    cell.gates.{rest}.weight | cell.{rest}.kernel | o d -> d o
    cell.gates.{rest}.bias | cell.{rest}.bias
    """
    return Case(first, linen(Port(), carry(held(first), rules(names)), inputs), inputs)


@entry(
    "LSTM",
    "fused gates",
    faults={"gates-in-flax-order": fault("cell", ""), "output-gate-before-the-state": fault("cell", "")},
)
def lstm_fused_gates(wrong: str | None) -> Case:
    """Pair a layer per gate against all gates in two layers, by rules of four parts."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Cell(nnx.Module):
        def __init__(self) -> None:
            self.x = nnx.Linear(INNER, 4 * WIDTH, use_bias=False, rngs=rngs)
            self.h = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)

        def __call__(self, x, h, c):
            i, f, g, o = jnp.split(self.x(x) + self.h(h), 4, -1)
            if wrong == "gates-in-flax-order":
                i, f, o, g = i, f, g, o
            old, c = c, jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return jax.nn.sigmoid(o) * jnp.tanh(old if wrong == "output-gate-before-the-state" else c), c

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.cell = Cell()

        def __call__(self, x):
            h = c = jnp.zeros((x.shape[0], WIDTH), x.dtype)
            out = []
            for step in range(x.shape[1]):
                h, c = self.cell(x[:, step], h, c)
                out.append(h)
            return jnp.stack(out, 1)

    def four(kind: str, word: str) -> str:
        return ", ".join(f"cell.gates.{kind}{gate}.{word}" for gate in "ifgo")

    table = rules(f"""
    {four("i", "weight")} | cell.x.kernel | o d -> d o | along=o
    {four("h", "weight")} | cell.h.kernel | o d -> d o | along=o
    {four("h", "bias")} | cell.h.bias | o -> o | along=o
    """)
    first = torch_lstm_cell()
    return Case(first, onto(first, Port(), table), numbers(2, T, INNER), {"rules": table})


@entry(
    "GRU",
    faults={
        "reset-before-the-matrix": fault("gru", ""),
        "update-gate-the-other-way": fault("gru", ""),
        "reset-and-update-exchanged": fault("gru", ""),
    },
)
def gru(wrong: str | None) -> Case:
    """``torch.nn.GRU`` resets after the matrix product (gates r z n)."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(INNER, WIDTH, batch_first=True)

        def forward(self, x):
            out, last = self.gru(x)
            return out, last[0]

    rngs = nnx.Rngs(0)

    class GRU(nnx.Module):
        def __init__(self) -> None:
            self.ih, self.hh = nnx.Linear(INNER, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)

        def __call__(self, x):
            hh, bias = self.hh.kernel[...], self.hh.bias[...]

            def step(h, x):
                r, z, n = jnp.split(x, 3, -1)
                hr, hz, hn = jnp.split(h @ hh + bias, 3, -1)
                r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
                if wrong == "reset-and-update-exchanged":
                    r, z = z, r
                if wrong == "reset-before-the-matrix":
                    hn = (r * h) @ hh[:, 2 * WIDTH :] + bias[2 * WIDTH :]
                    n = jnp.tanh(n + hn)
                else:
                    n = jnp.tanh(n + r * hn)
                h = z * n + (1 - z) * h if wrong == "update-gate-the-other-way" else (1 - z) * n + z * h
                return h, h

            last, out = jax.lax.scan(step, jnp.zeros((x.shape[0], WIDTH), x.dtype), self.ih(x).swapaxes(0, 1))
            return out.swapaxes(0, 1), last

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.gru = GRU()

        def __call__(self, x):
            return self.gru(x)

    names = """
    gru.weight_ih_l0 | gru.ih.kernel | o d -> d o
    gru.weight_hh_l0 | gru.hh.kernel | o d -> d o
    gru.bias_ih_l0 | gru.ih.bias
    gru.bias_hh_l0 | gru.hh.bias
    """
    first = fresh(Torch())
    return Case(first, onto(first, Port(), names), numbers(2, T, INNER))


HEADS = 2
RG_LRU_NAMES = """
linear_x.weight | linear_x.kernel | o d -> d o
linear_y.weight | linear_y.kernel | o d -> d o
linear_out.weight | linear_out.kernel | o d -> d o
conv.w | conv.w
conv.b | conv.b
rg_lru.a_param | rg_lru.a_param
rg_lru.input_gate.w | rg_lru.input_gate.w
rg_lru.input_gate.b | rg_lru.input_gate.b
rg_lru.a_gate.w | rg_lru.a_gate.w
rg_lru.a_gate.b | rg_lru.a_gate.b
{path}bias | {path}bias
"""
UNIT = inside("rg_lru", "input_gate", "a_gate")


def torch_griffin() -> Any:
    """Return Griffin's recurrent block: a gated branch, a short convolution, the RG-LRU as a loop."""
    import torch
    from torch import nn
    from torch.nn import functional

    class BlockDiagonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            size = WIDTH // HEADS
            self.w, self.b = nn.Parameter(torch.zeros(HEADS, size, size)), nn.Parameter(torch.zeros(HEADS, size))

        def forward(self, x):
            x = x.view(*x.shape[:-1], HEADS, -1)
            return (torch.einsum("...hi,hij->...hj", x, self.w) + self.b).flatten(-2)

    class RGLRU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_param = nn.Parameter(torch.zeros(WIDTH))
            self.input_gate, self.a_gate = BlockDiagonal(), BlockDiagonal()

        def forward(self, x, positions):
            x, gate = x * torch.sigmoid(self.input_gate(x)), torch.sigmoid(self.a_gate(x))
            a = torch.exp(-8.0 * gate * functional.softplus(self.a_param))
            start = (positions == 0)[..., None]
            x = x * torch.where(start, 1.0, torch.sqrt(1 - a * a))
            a, h, out = torch.where(start, 0.0, a), torch.zeros_like(x[:, 0]), []
            for step in range(x.shape[1]):
                h = a[:, step] * h + x[:, step]
                out.append(h)
            return torch.stack(out, 1)

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.zeros(4, WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            padded = functional.pad(x, (0, 0, 3, 0))
            return sum(padded[:, i : i + x.shape[1]] * self.w[i] for i in range(4)) + self.b

    class Griffin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear_x, self.linear_y = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.conv, self.rg_lru, self.linear_out = Conv(), RGLRU(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, positions):
            y = functional.gelu(self.linear_y(x), approximate="tanh")
            return self.linear_out(self.rg_lru(self.conv(self.linear_x(x)), positions) * y)

    return fresh(Griffin())


@entry(
    "RG-LRU",
    "associative scan",
    "positions as given",
    faults={
        "gates-exchanged": fault(*UNIT, "rg_lru.input_gate", "rg_lru.a_gate"),
        "document-start-not-reset": fault(*UNIT),
        "branches-exchanged": fault(*inside("", "linear_x", "linear_y", "conv", "linear_out"), "linear_x", "linear_y"),
        "taps-reversed": fault("conv"),
        "decay-not-squared": fault(*UNIT),
    },
)
def griffin(wrong: str | None) -> Case:
    """Square weights throughout; the port runs ``associative_scan`` over packed documents."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    rngs = nnx.Rngs(0)

    class BlockDiagonal(nnx.Module):
        def __init__(self) -> None:
            size = WIDTH // HEADS
            self.w, self.b = nnx.Param(jnp.zeros((HEADS, size, size))), nnx.Param(jnp.zeros((HEADS, size)))

        def __call__(self, x):
            x = x.reshape(*x.shape[:-1], HEADS, -1)
            return (jnp.einsum("...hi,hij->...hj", x, self.w[...]) + self.b[...]).reshape(*x.shape[:-2], -1)

    class RGLRU(nnx.Module):
        def __init__(self) -> None:
            self.a_param = nnx.Param(jnp.zeros(WIDTH))
            self.input_gate, self.a_gate = BlockDiagonal(), BlockDiagonal()

        def __call__(self, x, positions):
            gate_x, gate_a = jax.nn.sigmoid(self.input_gate(x)), jax.nn.sigmoid(self.a_gate(x))
            if wrong == "gates-exchanged":
                gate_x, gate_a = gate_a, gate_x
            log_a = -8.0 * gate_a * jax.nn.softplus(self.a_param[...])
            start = (positions == 0)[..., None]
            start = start & (jnp.arange(x.shape[1]) == 0)[:, None] if wrong == "document-start-not-reset" else start
            a, square = jnp.exp(log_a), jnp.exp(log_a if wrong == "decay-not-squared" else 2 * log_a)
            x = x * gate_x * jnp.where(start, 1.0, jnp.sqrt(1 - square))

            def compose(one, two):
                return one[0] * two[0], two[0] * one[1] + two[1]

            return jax.lax.associative_scan(compose, (jnp.where(start, 0.0, a), x), axis=1)[1]

    class Conv(nnx.Module):
        def __init__(self) -> None:
            self.w, self.b = nnx.Param(jnp.zeros((4, WIDTH))), nnx.Param(jnp.zeros(WIDTH))

        def __call__(self, x):
            padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
            w = self.w[...][::-1] if wrong == "taps-reversed" else self.w[...]
            return sum(padded[:, i : i + x.shape[1]] * w[i] for i in range(4)) + self.b[...]

    class Griffin(nnx.Module):
        def __init__(self) -> None:
            self.linear_x, self.linear_y = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.conv, self.rg_lru, self.linear_out = Conv(), RGLRU(), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x, positions):
            ours, other = self.linear_x(x), self.linear_y(x)
            if wrong == "branches-exchanged":
                ours, other = other, ours
            return self.linear_out(self.rg_lru(self.conv(ours), positions) * jax.nn.gelu(other))

    first = torch_griffin()
    positions = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]])
    inputs = {"x": numbers(2, 6, WIDTH), "positions": positions}
    return Case(first, onto(first, Griffin(), RG_LRU_NAMES), inputs)


@entry(
    "RG-LRU",
    "Linen",
    "scan",
    faults={
        "decay-off-by-1e-3": fault("", ("decay", "input", "out")),
        "first-step-skipped": fault("", ("decay", "input", "out")),
    },
)
def linear_recurrence_linen(wrong: str | None) -> Case:
    """Pair a diagonal linear recurrence with an input-dependent decay, in Linen with ``lax.scan``."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import linen as fnn
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay, self.input, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            a, u, h, out = torch.sigmoid(self.decay(x)), self.input(x), 0.0, []
            for step in range(x.shape[1]):
                h = a[:, step] * h + (1 - a[:, step]) * u[:, step]
                out.append(h)
            return self.out(torch.stack(out, 1))

    class Port(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            a, u = fnn.sigmoid(fnn.Dense(WIDTH, name="decay")(x)), fnn.Dense(WIDTH, name="input")(x)
            a = a * 0.999 if wrong == "decay-off-by-1e-3" else a
            u = u.at[:, 0].set(0.0) if wrong == "first-step-skipped" else u

            def step(h, au):
                h = au[0] * h + (1 - au[0]) * au[1]
                return h, h

            _, out = jax.lax.scan(step, jnp.zeros_like(u[:, 0]), (a.swapaxes(0, 1), u.swapaxes(0, 1)))
            return fnn.Dense(WIDTH, name="out")(out.swapaxes(0, 1))

    first, inputs = fresh(Torch()), numbers(2, T, WIDTH)
    carried = carry(held(first), rules("{path}weight | {path}kernel | o d -> d o\n{path}bias | {path}bias"))
    return Case(first, linen(Port(), carried, inputs), inputs)
