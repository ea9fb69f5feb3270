"""Laws of torch modules: each is broken by a module with that fault, and by no right one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import torch_attn
from attn_bridge import parity, specs
from attn_bridge.cli.app import run as run_command
from attn_parity.check.cases import draw_positions

from ...support.calls.bad_calls import D_IN, MODULES
from ...support.calls.cover import some
from ...support.models import drawn_encoder_decoders

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 6, 8)).astype("float32")
IMAGES = RANDOM.normal(size=(2, 3, 6, 6)).astype("float32")
IDS = RANDOM.integers(3, 32, (2, 8))


class Attention(nn.Module):
    """Causal attention with a cache, heads and a mask of padding, and a place for a fault."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.fault, self.num_heads = fault, 2
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out_proj = nn.Linear(8, 8)

    def forward(self, x, attention_mask=None, cache=None, is_causal=True, document_ids=None):
        batch, tokens, width = x.shape
        query, key, value = (self.split(project(x)) for project in (self.query, self.key, self.value))
        if cache is not None:
            key = torch.cat([cache[0], key], 2)
            value = torch.cat([cache[1].roll(1, 2) if self.fault == "cache" else cache[1], value], 2)
        scores = query @ key.transpose(-1, -2)
        keys = scores.shape[-1]
        hidden = torch.ones(tokens, keys, dtype=torch.bool).triu(keys - tokens + 1 + (self.fault == "causality"))
        scores = scores.masked_fill(hidden, float("-inf"))
        if attention_mask is not None:
            shown = attention_mask[:, None, None].to(torch.bool)
            scores = scores.masked_fill(~shown, -3.0 if self.fault == "padding" else -1e30)
        if document_ids is not None:
            keys_of = document_ids.roll(1, 1) if self.fault == "documents" else document_ids
            scores = scores.masked_fill((document_ids[:, :, None] != keys_of[:, None])[:, None], -1e30)
        if self.fault == "dtype":
            scores = scores * torch.tensor([1.0])
        context = (scores.softmax(-1) @ value.to(scores.dtype)).transpose(1, 2).reshape(batch, tokens, width)
        if self.fault == "dtype":
            return nn.functional.linear(context, self.out_proj.weight.to(context.dtype)), (key, value)
        return self.out_proj(context), (key, value)

    def split(self, x):
        batch, tokens, width = x.shape
        if self.fault == "heads":
            return x.reshape(batch, self.num_heads, tokens, width // self.num_heads)
        return x.reshape(batch, tokens, self.num_heads, width // self.num_heads).transpose(1, 2)


class WrongTanh(torch.autograd.Function):
    """The tanh with a gradient that is 1 % too large."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 1.01 * gradient * (1 - x.tanh() ** 2)


class WrongGradient(nn.Module):
    """A layer before `WrongTanh`."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(WrongTanh.apply(self.layer(x)))


class Drawing(nn.Module):
    """A dropout that eval mode does not switch off."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


class Counting(nn.Module):
    """A call that changes the next one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Averaging(nn.Module):
    """A norm that moves its running mean in eval mode, after it has used it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, x):
        normed = x * 2
        self.running_mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return normed


class FirstRow(nn.Module):
    """A module that treats the first row of a batch in another way."""

    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        return torch.cat([centred[:1] * 2, centred[1:]])


class Indexed(nn.MultiheadAttention):
    """Attention that adds the position of each key to it."""

    def forward(self, query, key, value, **options):
        at = torch.arange(key.shape[1], dtype=key.dtype)[:, None]
        return super().forward(query, key + at, value, **options)


class RotatedValues(nn.MultiheadAttention):
    """Attention whose values belong to the key before."""

    def forward(self, query, key, value, **options):
        return super().forward(query, key, value.roll(1, 1), **options)


class RotatedHeads(nn.Module):
    """Attention whose heads use the values of the next head."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        query, key, value = (
            p(x).unflatten(-1, (4, 2)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return self.o_proj((weights @ value.roll(1, 1)).transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """Two layers of attention, the first with a fault."""

    def __init__(self, fault):
        super().__init__()
        self.first, self.second = Attention(fault), Attention()

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


FAULTS = {
    "determinism: a draw": ("determinism", Drawing, X),
    "determinism: a count": ("determinism", Counting, X),
    "determinism: statistics": ("determinism", Averaging, X),
    "batch: statistics of a batch": ("batch", lambda: nn.BatchNorm1d(8, track_running_stats=False), X[:, 0]),
    "batch: the same of images": ("batch", lambda: nn.BatchNorm2d(3, track_running_stats=False), IMAGES),
    "rows: the first is special": ("rows", FirstRow, X),
    "padding: it leaks": ("padding", lambda: Attention("padding"), X),
    "causality: a mask off by one": ("causality", lambda: Attention("causality"), X),
    "cache: a position late": ("cache", lambda: Attention("cache"), X),
    "chunks: a position late": ("chunks", lambda: Attention("cache"), X),
    "keys: positions": ("keys", lambda: Indexed(8, 2, batch_first=True), (X, X, X)),
    "keys: values of another": ("keys", lambda: RotatedValues(8, 2, batch_first=True), (X, X, X)),
    "heads: no transpose": ("heads", lambda: Attention("heads"), X),
    "heads: no transpose in the first layer": ("heads", lambda: Layers("heads"), X),
    "heads: values of another": ("heads", RotatedHeads, X),
    "documents: ids of keys off by one": ("documents", lambda: Attention("documents"), X),
    "gradients: a factor": ("gradients", WrongGradient, X),
    "dtype: a float32 constant": ("dtype", lambda: Attention("dtype"), X),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_law_is_named_with_a_witness(name):
    law, make, inputs = FAULTS[name]
    module = make()
    report = parity.laws(module, inputs)
    (found,) = [one for one in report.broken if one.name == law]
    assert found.witness is not None
    assert found.witness.expected != found.witness.got
    assert found.size > found.limit
    with pytest.raises(parity.LawsError, match=law):
        report.raise_for_broken()


def test_the_right_attention_obeys_all_laws_that_are_tried():
    report = parity.laws(Attention(), X).raise_for_broken()
    held = {law.name for law in report.laws if law.status == "holds"}
    assert held == {"determinism", "batch", "rows", "padding", "causality", "cache", "chunks"} | {
        *("documents", "heads", "gradients", "dtype")
    }


def test_the_witness_of_a_mask_off_by_one_is_the_position_before():
    report = parity.laws(Attention("causality"), X, only="causality")
    (law,) = report.broken
    start = int(law.witness.change.split("position ")[1].split()[0])
    assert law.witness.index[1] == start - 1


@pytest.mark.parametrize("token", [1, 3, 4, 5])
def test_causality_is_tried_at_the_second_the_middle_and_the_last_two_tokens(token):
    def looking_ahead(_, x):
        return torch.cat([x[:, : token - 1], x[:, token - 1 : token] + x[:, token : token + 1], x[:, token:]], 1)

    (law,) = parity.laws(parity.function(looking_ahead, {}, framework="torch"), X, only="causality").laws
    assert law.status == "broken"


class WithWeights(nn.Module):
    """Causal attention of as many heads as tokens that also returns its weights, keys and values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 18)

    def forward(self, x, is_causal=True):
        query, key, value = self.layer(x).unflatten(-1, (3, 6, 1)).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (query @ key.transpose(-1, -2)).masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2), weights, (key, value)


class Detaching(nn.Linear):
    """A layer that returns its memory for the next call without a gradient, as XLNet does."""

    def forward(self, x):
        hidden = super().forward(x).tanh()
        return hidden, hidden.detach()


def recurrent(_, x):
    """Run a recurrence over axis 0, for the size of axis 1 that its state has."""
    state, states = torch.zeros(6, 8, dtype=x.dtype), []
    for token in x:
        state = torch.tanh(token + state)
        states.append(state)
    return torch.stack(states)


def right_modules():
    """Return name -> maker of a stock module, and its inputs."""
    triple = (X, X, X)
    causal = {"query": X, "key": X, "value": X, "attn_mask": np.triu(np.ones((6, 6), bool), 1), "is_causal": True}
    return {
        "linear": (lambda: nn.Linear(8, 3), X),
        "batch norm": (lambda: nn.BatchNorm1d(8), X[:, 0]),
        "group norm": (lambda: nn.GroupNorm(2, 6), X),
        "network": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), IMAGES),
        "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), triple),
        "attention, sequence first": (lambda: nn.MultiheadAttention(8, 2, dropout=0.1), triple),
        "attention with further keys": (
            lambda: nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
            triple,
        ),
        "as many heads as tokens": (WithWeights, X[..., :6]),
        "as many real tokens as rows": (
            lambda: nn.TransformerEncoderLayer(8, 2, 16),
            RANDOM.normal(size=(6, 4, 8)).astype("float32"),
        ),
        "a state without a gradient": (lambda: Detaching(8, 8), X),
        "a state of one size": (lambda: parity.function(recurrent, {}), X),
        "embedding with a largest norm": (lambda: nn.Embedding(32, 4, max_norm=1.0), IDS),
        "embedding with scaled gradients": (lambda: nn.Embedding(32, 4, scale_grad_by_freq=True), IDS),
        "attention, masked": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), causal),
        "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), X),
        "decoder layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), (X, X[:, :5])),
        "lstm": (lambda: nn.LSTM(8, 4, bidirectional=True, batch_first=True), X),
        "gru, sequence first": (lambda: nn.GRU(8, 4), X),
        "embedding with padding": (lambda: nn.Embedding(32, 4, padding_idx=3), IDS),
        "loss": (lambda: parity.function(lambda _, x, y: nn.functional.mse_loss(x, y), {}), (X, 2 * X)),
        "one sequence": (lambda: parity.function(lambda _, x: torch.softmax(x @ x.T, -1) @ x, {}), X[0]),
        "dropout": (lambda: nn.Dropout(0.5), X),
    }


@pytest.mark.parametrize("name", right_modules())
def test_stock_modules_break_no_law(name):
    make, inputs = right_modules()[name]
    parity.laws(make(), inputs).raise_for_broken()


def foreign_models():
    """Return name -> maker of a tiny random model of transformers."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"vocab_size": 32, "max_position_embeddings": 16}
    llama = {**small, "num_key_value_heads": 1, "head_dim": 4}
    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    gpt2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    return {
        "GPT2LMHeadModel": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "LlamaForCausalLM": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)),
        "MistralForCausalLM": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(sliding_window=4, **llama)
        ),
        "BertModel": lambda: transformers.BertModel(transformers.BertConfig(**small)),
        "T5EncoderModel": lambda: transformers.T5EncoderModel(transformers.T5Config(**t5)),
        "BloomForCausalLM": lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=32)
        ),
    }


FOREIGN = ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "BertModel", "T5EncoderModel")
FOREIGN += ("BloomForCausalLM",)


@some("name", FOREIGN, always=("GPT2LMHeadModel", "BertModel"))
def test_models_of_transformers_break_no_law(name):
    report = parity.laws(foreign_models()[name](), {"input_ids": IDS}).raise_for_broken()
    held = {law.name for law in report.laws if law.status == "holds"}
    assert {"determinism", "batch", "padding", "gradients"} <= held
    assert ("causality" in held, "cache" in held) == (("CausalLM" in name or "GPT" in name),) * 2


def test_a_prefill_of_mamba_that_forgets_its_state_is_broken():
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, state_size=4)
    report = parity.laws(transformers.MambaModel(config), IDS, only=["cache", "chunks", "dtype"])
    assert [law.status for law in report.laws] == ["holds", "broken", "not tried"]  # 5.23 forgets it between chunks
    assert report.laws[2].why == "its config asks for float32 (residual_in_fp32)"


def variant_cases():
    """Return the id of every example of every variant."""
    ids = []
    for variant in specs.VARIANTS:
        ids += [f"{variant.name} {example.name}" for example in variant.examples] or [variant.name]
    return ids


def variant_case(case: str):
    """Return the side and the inputs of an example of a variant."""
    name, _, example = case.partition(" ")
    variant = specs.find_variant(name)
    if variant.is_function:
        return parity.function(lambda _, x: getattr(torch_attn, name)(x), {}, framework="torch"), X
    if not example:
        arguments = MODULES.get(name, {"emb_dim": D_IN})
        return getattr(torch_attn, name)(**arguments), RANDOM.normal(size=(2, 5, D_IN)).astype("float32")
    found = next(one for one in variant.examples if one.name == example)
    inputs = {"x": RANDOM.normal(size=(2, 5, found.config.d_in)).astype("float32")}
    if found.context is not None:
        inputs["context"] = RANDOM.normal(size=(2, *found.context)).astype("float32")
    axes = getattr(getattr(found.config, "position", None), "axes", None)
    if axes is not None:
        inputs["positions"] = draw_positions(RANDOM, axes, 2, 5)
    return getattr(torch_attn, name)(config=found.config), inputs


FIRST = [next(case for case in variant_cases() if case.split()[0] == variant.name) for variant in specs.VARIANTS]


@some("case", variant_cases(), always=FIRST)
def test_our_variants_break_no_law(case):
    side, inputs = variant_case(case)
    report = parity.laws(side, inputs).raise_for_broken()
    status = {law.name: law.status for law in report.laws}
    batches = "not tried" if isinstance(inputs, dict) and "positions" in inputs else "holds"
    assert [status[name] for name in ("determinism", "batch", "rows", "gradients")] == [
        "holds",
        batches,
        batches,
        "holds",
    ]


def test_a_decoder_behind_an_encoder_is_judged_by_its_own_tokens():
    model = torch_attn.EncoderDecoderModel(drawn_encoder_decoders.read("bart", encoder_layers=1, decoder_layers=1))
    report = parity.laws(model, {"source": IDS[:, :5] % 23, "tokens": IDS % 23}, only=["causality", "cache"])
    assert [law.status for law in report.laws] == ["holds", "holds"]


# ---- when a law is tried


class Pooling(nn.Module):
    """An encoder of ids whose convolution sees padding, unless it is right."""

    def __init__(self, is_right):
        super().__init__()
        self.is_right = is_right
        self.embed, self.layer = nn.Embedding(32, 8), nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, input_ids, token_type_ids, attention_mask):
        real = attention_mask[..., None]
        hidden = self.embed(input_ids + token_type_ids) * (real if self.is_right else 1)
        return self.layer(hidden.transpose(1, 2)).transpose(1, 2) * real


@pytest.mark.parametrize(("is_right", "status"), [(True, "holds"), (False, "broken")])
def test_padding_is_tried_where_the_call_has_a_mask_and_types(is_right, status):
    ones = np.ones_like(IDS)
    call = {"input_ids": IDS % 31, "token_type_ids": ones, "attention_mask": ones}
    (law,) = parity.laws(Pooling(is_right), call, only="padding").laws
    assert law.status == status


def test_an_encoder_is_not_called_acausal_unless_asked():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    (law,) = [one for one in parity.laws(layer, X).laws if one.name == "causality"]
    assert (law.status, law.why.split(",")[0]) == ("not tried", "the module does not claim to be causal")
    (law,) = parity.laws(layer, X, only=["causality"]).laws
    assert law.status == "broken"


def test_an_axis_that_may_be_the_sequence_is_not_called_a_batch():
    side = parity.function(lambda _, x: torch.cumsum(x, 0), {})
    status = {law.name: law.status for law in parity.laws(side, X).laws}
    assert status["batch"] == "not tried"
    assert [law.name for law in parity.laws(side, X, only="batch").broken] == ["batch"]
    assert parity.laws(side, X, only="batch", batch_axis=1).passed


class Nothing(nn.Module):
    def forward(self, x):
        return x * float("nan")


def test_outputs_of_nan_obey_no_law():
    with pytest.raises(ValueError, match=r"^the outputs hold no finite number, so no law can be tried$"):
        parity.laws(Nothing(), X)


def test_a_module_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6), nn.Dropout(0.1)).train()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    parity.laws(module, X)
    assert module.training
    assert all(one.training for one in module.modules())
    assert all(torch.equal(before[name], one) for name, one in module.state_dict().items())
    assert all(one.grad is None for one in module.parameters())


def test_a_straight_jump_is_not_called_a_wrong_gradient():
    side = parity.function(lambda _, x: torch.where(x > 0, x, x.detach() - x.detach()), {})
    assert not parity.laws(side, X, only="gradients").broken


def test_a_gradient_that_is_wrong_on_purpose_is_broken_with_the_purpose():
    side = parity.function(lambda _, x: x + (torch.sign(x) - x).detach(), {})
    report = parity.laws(side, X, only="gradients")
    (law,) = report.broken
    assert law.purpose == "a straight-through estimator, or a stopped, reversed or clipped gradient"
    text = " ".join(str(report).split())
    assert f"note: gradients can be broken on purpose ({law.purpose}): keep an original that means it; a port " in text
    assert report.to_json()["laws"][0]["purpose"] == law.purpose
    held = parity.laws(nn.Linear(8, 8), X, only="gradients")
    assert "on purpose" not in str(held)


def test_another_seed_gives_the_same_verdicts():
    reports = [parity.laws(Attention("padding"), X, seed=seed) for seed in range(3)]
    assert len({tuple((law.name, law.status) for law in report.laws) for report in reports}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "batches"}, r"only \(batches\) must be one of determinism, batch, rows"),
        ({"output": ""}, r"output \(''\) must be the name of an entry"),
        ({"batch_axis": 3}, r"batch_axis \(3\) must be an axis of the first input, which has 3"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parity.laws(nn.Linear(8, 3), X, **options)


# ---- the command


SOURCE = """
import torch
from torch import nn


class CausalSum(nn.Module):
    def forward(self, x):
        print("noise")
        return x.flip(1).cumsum(1)


class Right(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


def loss():
    from attn_bridge import parity
    return parity.function(lambda _, x: torch.rand(()) + x.sum(), {})
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_the_command_exits_with_1_if_a_law_is_broken(file, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert run_command(["laws", f"{file}:CausalSum", "--shape", "2,5,4", "--json", str(report)]) == 1
    shown = capsys.readouterr()
    assert "noise" not in shown.out
    assert "causality    broken" in shown.out
    assert "again: attn-bridge laws" in shown.out
    (law,) = [one for one in json.loads(report.read_text())["laws"] if one["status"] == "broken"]
    assert law["name"] == "causality"
    assert len(law["witness"]["index"]) == 3


def test_the_command_exits_with_0_if_all_hold(file, capsys):
    assert run_command(["laws", f"{file}:Right", "--shape", "2,5,4", "--only", "batch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "2,5,4", "--only", "speed"], "--only (speed) must be one of determinism"),
        ([], "there are no inputs: give --inputs FILE.npz or --shape"),
        (["--shape", "2,5,4", "--seed", "-1"], "--seed (-1) must be at least 0"),
        (["--shape", "2,5,4", "--only", "padding"], "no law could be tried: the module takes no mask"),
    ],
)
def test_the_command_exits_with_2_and_one_line(file, words, message, capsys):
    assert run_command(["laws", f"{file}:Right", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("law", ["chunks", "padding"])
def test_four_tokens_are_enough_for_a_law_of_sequences(law):
    (three,), (four,) = (parity.laws(Attention(), X[:, :length], only=[law]).laws for length in (3, 4))
    assert (three.status, three.why) == ("not tried", "the sequence has fewer than four tokens")
    assert four.status == "holds"


class MaskedMean(nn.Module):
    """A mean over the real tokens, or one that divides by all of them."""

    def __init__(self, fault: bool):
        super().__init__()
        self.fault, self.layer = fault, nn.Linear(8, 4)

    def forward(self, x, attention_mask):
        mean = (self.layer(x) * attention_mask[..., None]).sum(1)
        return mean / (x.shape[1] if self.fault else attention_mask.sum(1, keepdim=True))


class Backward(nn.Module):
    """A recurrence from the last token on, over the real tokens or over padding as well."""

    def __init__(self, fault: bool):
        super().__init__()
        self.fault, self.layer = fault, nn.Linear(8, 8)

    def forward(self, x, lengths):
        real = (torch.arange(x.shape[1])[None] < lengths[:, None])[..., None]
        x = self.layer(x)
        return real * (x if self.fault else x * real).flip(1).cumsum(1).flip(1)


def test_masks_of_other_axes_that_broadcast_the_outputs_are_no_way_to_hide_padding():
    def attend(_, x, attention_mask=None):
        scores = x @ x.transpose(1, 2)
        hidden = torch.zeros((), dtype=torch.bool) if attention_mask is None else ~attention_mask.bool()[:1, None]
        return scores.masked_fill(hidden, -1e30).softmax(-1) @ x

    (law,) = parity.laws(parity.function(attend, {}, framework="torch"), X, only="padding").laws
    assert (law.status, law.why.count("(B")) == ("broken", 2)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(
    ("make", "further"),
    [(MaskedMean, {"attention_mask": np.ones((3, 6), int)}), (Backward, {"lengths": np.array([6, 4, 3])})],
)
def test_padding_is_tried_on_pooled_outputs_and_with_lengths_that_are_given(make, further, fault):
    (law,) = parity.laws(make(fault), {"x": X, **further}, only="padding").laws
    assert law.status == ("broken" if fault else "holds")


@pytest.mark.parametrize(("pool", "status"), [("first", "holds"), ("last", "holds"), ("largest", "broken")])
def test_an_output_that_is_pooled_from_the_first_or_the_last_token_may_be_padded_on_its_other_end(pool, status):
    def pooled(_, x, attention_mask=None):
        hidden = torch.zeros((), dtype=torch.bool) if attention_mask is None else ~attention_mask.bool()[:, None]
        x = (x @ x.transpose(1, 2)).masked_fill(hidden, -1e30).softmax(-1) @ x
        return {"first": x[:, 0], "last": x[:, -1], "largest": x.amax(1)}[pool]

    (law,) = parity.laws(parity.function(pooled, {}, framework="torch"), X, only="padding").laws
    assert law.status == status


def test_padding_is_not_tried_on_pooled_outputs_of_a_mask_that_may_hide_other_tokens():
    def pooled(_, x, mask=None):
        return (x if mask is None else x * mask[..., None]).mean(1)

    report = parity.laws(parity.function(pooled, {}, framework="torch"), X, only=["batch", "padding"])
    (law,) = [law for law in report.laws if law.name == "padding"]
    assert (law.status, law.why[-34:]) == ("not tried", "no output has an element per token")


def parity_of_numbers(numbers):
    return numbers % 2


def of_the_first_row(numbers):
    return numbers[:1].expand_as(numbers)


@pytest.mark.parametrize("fault", [None, parity_of_numbers, of_the_first_row])
def test_documents_are_more_than_two_and_differ_between_rows(fault):
    def mean(_, x, document_ids=None):
        if document_ids is None:
            return x
        numbers = fault(document_ids) if fault else document_ids
        same = (numbers[:, :, None] == numbers[:, None]).to(x.dtype)
        return same @ x / same.sum(-1, keepdim=True)

    (law,) = parity.laws(parity.function(mean, {}, framework="torch"), X, only="documents").laws
    assert law.status == ("broken" if fault else "holds")


@pytest.mark.parametrize("fault", [None, parity_of_numbers])
def test_documents_of_a_sequence_without_a_batch_are_apart(fault):
    def attention(_, x, document_ids=None):
        if document_ids is None:
            return x
        numbers = fault(document_ids) if fault else document_ids
        same = (numbers[:, None] == numbers).to(x.dtype)
        return same @ x / same.sum(-1, keepdim=True)

    (law,) = parity.laws(parity.function(attention, {}, framework="torch"), X[0], only="documents").laws
    assert law.status == ("broken" if fault else "holds")


class Marked(nn.Module):
    """A module whose outputs are wrong in one place."""

    def __init__(self, law):
        super().__init__()
        self.law, self.layer = law, nn.Linear(8, 8)

    def forward(self, x, attention_mask=None, document_ids=None):
        wrong, x = x.detach().sum((0, 1) if self.law == "batch" else 1), self.layer(x)
        if self.law == "batch":
            x = x.cumsum(1)
            return torch.cat([x[:2], x[2:] + wrong])
        if self.law == "padding" and attention_mask is not None:
            return torch.cat([x[:, :2], x[:, 2:] + wrong[:, None]], 1)
        if self.law == "documents" and document_ids is not None:
            return torch.cat([x[:, :5], x[:, 5:] + wrong[:, None]], 1)
        return x


@pytest.mark.parametrize(("law", "axis", "place"), [("batch", 0, {2}), ("padding", 1, {2, 3}), ("documents", 1, {5})])
def test_a_witness_has_its_index_in_the_whole_output(law, axis, place):
    (broken,) = parity.laws(Marked(law), X, only=law).broken
    assert broken.witness.index[axis] in place
    assert law != "padding" or broken.witness.index[0] > 0
