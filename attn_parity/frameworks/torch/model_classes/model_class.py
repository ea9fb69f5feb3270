"""Tiny random instances of a class of `transformers`, and the keys of a config that they read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_bridge.models.reading.model_config import nested
from attn_bridge.models.rows.common import sinusoids
from attn_bridge.printable import printable
from attn_bridge.whole_files import JsonObject

from ..running.promotion import promoted
from .sizes import LATENT, LAYERS, ODD, OWN_SIZES, SIZES

_OF_DECODERS = {
    "num_hidden_layers": ("decoder_layers", "num_decoder_layers"),
    "num_attention_heads": ("decoder_attention_heads", "num_decoder_attention_heads"),
}
"""Usual key -> its names in configs of encoders with a decoder, where the usual one is about the encoder."""

_RESOLVED = (
    "num_key_value_heads",
    "head_dim",
    "attention_multiplier",
    "word_embed_proj_dim",
    "ffn_hidden_size",
    "num_kv_heads",
    "decoder_vocab_size",
    "v_head_dim",
)
"""Numbers that a class without a default computes from others of the same config."""

ABSENT = "<absent>"
"""Value of a key that a config leaves out."""


class DerivationError(ValueError):
    """A class that can't be derived; the message names the first part that is not understood."""


@dataclasses.dataclass(frozen=True)
class ModelClass:
    """A class of `transformers`, its config class, and the keys of tiny instances.

    Attributes:
        model_type: name of the family.
        config_class: class of its configs.
        model_class: class of its models.
        sizes: keys of a tiny instance.
        read: keys of a config that an instance reads, when it is made or run.
        kept: instances and their results, by config and seed: a proof needs those of the proposal again.
    """

    model_type: str
    config_class: type[Any]
    model_class: type[Any]
    sizes: Mapping[str, Any]
    read: frozenset[str] = frozenset()
    kept: JsonObject = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def defaults(self) -> JsonObject:
        """The values of a config that is made without keys."""
        defaults: JsonObject = self.config_class().to_dict()
        defaults |= {
            f"{outer}.{inner}": value
            for outer in self.nested
            for inner, value in defaults[outer].items()
            if inner not in _common_keys()
        }
        if not dataclasses.is_dataclass(self.config_class):
            return defaults
        plain = {field.name: field.default for field in dataclasses.fields(self.config_class)}
        # None stands for a number that depends on others of the file.
        return {key: None if key in _RESOLVED and plain.get(key) is None else value for key, value in defaults.items()}

    @property
    def nested(self) -> list[str]:
        """Keys whose values are configs; a key of these has both names with a dot."""
        made = self.config_class().to_dict()
        return [key for key in getattr(self.config_class, "sub_configs", {}) if isinstance(made.get(key), dict)]

    @property
    def decoder_keys(self) -> dict[str, str]:
        """Usual key -> the key of the decoder, where the class has one that is not another name of the usual key."""
        names = getattr(self.config_class, "attribute_map", {})
        return {
            usual: key
            for usual, keys in _OF_DECODERS.items()
            for key in keys
            if key in self.sizes and names.get(usual) != key
        }

    @property
    def odd(self) -> list[str]:
        """Keys of a tiny instance that scale or clip something."""
        return [key for key in self.sizes if key.rpartition(".")[2] in ODD]

    @property
    def mixed_layers(self) -> list[str]:
        """Both kinds of layers in turn, where the usual instance has one kind alone; else an empty list."""
        kinds = set(getattr(self.config(self.keys()), "layer_types", None) or ())
        return (
            [("full_attention", "sliding_attention")[layer % 2] for layer in range(LAYERS)] if len(kinds) == 1 else []
        )

    @property
    def own_keys(self) -> set[str]:
        """The keys that the class of configs adds to those of all models; some only decide other keys."""
        return self.defaults.keys() - _common_keys() - set(self.nested)

    def canonical(self, key: str) -> str:
        """Return the name under which a description reads a key: that of most families, where a class renames it."""
        names = getattr(self.config_class, "attribute_map", {})
        return next((outer for outer, inner in names.items() if inner == key), key)

    @property
    def other_names(self) -> dict[str, tuple[str, ...]]:
        """Name under which a description reads a key, as `canonical` returns it -> its other names in files."""
        outers: dict[str, list[str]] = {}
        for outer, inner in getattr(self.config_class, "attribute_map", {}).items():
            if outer not in self.decoder_keys:
                outers.setdefault(inner, []).append(outer)
        return {first: (inner, *others) for inner, (first, *others) in outers.items()}

    def keys(self, **changes: object) -> JsonObject:
        """Return the keys of a tiny config with some changed, or left out where they are `ABSENT`."""
        keys = {"model_type": self.model_type, **self.sizes, **changes}
        return nested({key: value for key, value in keys.items() if value is not ABSENT})

    def usual(self, key: str) -> object:
        """Return the value of a key in the usual instance: that of its sizes, or the default."""
        return self.sizes.get(key, self.defaults.get(key))

    def fitting(self, fixed: Mapping[str, tuple[object, ...]]) -> ModelClass:
        """Return the class without the keys of its usual instance that a description refuses.

        Args:
            fixed: key -> the values that the description accepts.
        """
        sizes = {key: value for key, value in self.sizes.items() if value in fixed.get(self.canonical(key), (value,))}
        return self if sizes == self.sizes else dataclasses.replace(self, sizes=sizes, kept={})

    def config(self, keys: Mapping[str, object]) -> Any:
        """Return the config of a config.json with these keys."""
        # A copy: classes write their defaults, such as rope_theta, into mappings inside the file.
        config = self.config_class.from_dict(copy.deepcopy(dict(keys)))
        config._attn_implementation = "eager"
        return config

    def shapes(self, keys: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the tensors of an instance; a tied head is not among them."""
        with torch.device("meta"):
            model = self.model_class(self.config(keys))
        return {name: tuple(tensor.shape) for name, tensor in learned(model).items()}

    def instance(self, keys: Mapping[str, object], seed: int = 0) -> nn.Module:
        """Return an instance in float64, with random weights: no zeros, no ones, norms and biases included."""
        model: nn.Module = self.model_class(self.config(keys)).eval().double()
        _lift(model)
        generator = torch.Generator().manual_seed(seed)
        # A saved buffer of several numbers follows from the config: the rates of decay of lightning attention.
        computed = {name for name, buffer in model.named_buffers() if buffer.numel() and buffer.min() != buffer.max()}
        with torch.no_grad():
            for name, tensor in learned(model).items():
                if name in computed:
                    continue
                spread = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
                drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(1.3 * spread * drawn + (0.1 if tensor.ndim == 1 else 0.0))
        return model

    def check(self) -> None:
        """Run an instance."""
        with promoted(), torch.no_grad():
            self.instance(self.keys())(torch.tensor([[3, 5, 4, 7, 6, 9]]))


def learned(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> parameter or saved buffer, each once."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    # Of a tied pair the first name may be the head's, where a class makes its head first.
    tensors: dict[str, Tensor] = {
        name: tensor for name, tensor in model.named_parameters(remove_duplicate=False) if name not in ties
    }
    tensors = {name: tensor for name, tensor in tensors.items() if not _is_rotary(model, name, tensor)}
    saved = model.state_dict(keep_vars=True)
    tensors |= {name: one for name, one in model.named_buffers() if name in saved and one.is_floating_point()}
    return tensors


def _is_rotary(model: nn.Module, name: str, tensor: Tensor) -> bool:
    """Return whether a parameter is a frozen table of sinusoids by which heads turn (RoFormer)."""
    is_of_heads = tensor.shape[-1] != getattr(model.config, "hidden_size", None)
    return name.endswith("embed_positions.weight") and not tensor.requires_grad and is_of_heads


def _lift(model: nn.Module) -> None:
    """Set constants that `transformers` rounds, whatever the dtype of a model, to float64."""
    for name, tensor in model.named_parameters():
        if _is_rotary(model, name, tensor) and not tensor.is_meta:  # which transformers rounds to float32
            positions, width = tensor.shape
            tensor.data.copy_(torch.from_numpy(sinusoids(np.arange(positions), width)))
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        if type(module).__name__ == "BloomGelu":  # which has sqrt(2 / pi) to 8 digits
            module.forward = functools.partial(torch.nn.functional.gelu, approximate="tanh")


def find(model_type: str) -> ModelClass:
    """Return the class of a ``model_type`` in the installed `transformers`.

    Raises:
        DerivationError: `transformers` has no causal language model of that name, or none that can be made tiny.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) or _of_whole(model_type)
    if architecture is None:
        raise DerivationError(
            f"model_type ({printable(model_type)}) has no causal language model in transformers "
            f"{transformers.__version__}"
        )
    try:
        model_class = getattr(transformers, architecture)
        config_class = CONFIG_MAPPING[model_type]
        if "text_config" in config_class.sub_configs and "text_config" not in model_class.config_class.sub_configs:
            config_class = model_class.config_class  # the class runs the text model of a multimodal one
            model_type = config_class.model_type
        base = config_class()
        own = base.to_dict()

        def has_field(key: str) -> bool:
            """Return whether a config may set the key; a property that it computes from others is not a key.

            An attribute whose value depends on the layer is a key of the file that raises where it is read (Gemma 4).
            """
            return (key in own or hasattr(base, key)) and not isinstance(getattr(config_class, key, None), property)

        sizes = {key: value for key, value in SIZES.items() if has_field(key)}
        if LATENT in sizes:
            sizes = {key: value for key, value in sizes.items() if key != "head_dim"}
            sizes |= {"num_key_value_heads": sizes["num_attention_heads"]} if "num_key_value_heads" in sizes else {}
        names = getattr(config_class, "attribute_map", {})
        sizes = {
            key: value
            for key, value in sizes.items()
            if key not in names or (key in own and not names[key].startswith("encoder_"))
        }
        sizes |= OWN_SIZES.get(model_type, {})
        subject = ModelClass(model_type, config_class, model_class, sizes)
        try:
            subject.check()
        except Exception:  # a class that compares tokens with the one of padding, or checks it, needs a number
            plain = {key: value for key, value in sizes.items() if key != "pad_token_id"}
            for sizes in (plain, {**plain, "pad_token_id": 0}):
                subject = dataclasses.replace(subject, sizes=sizes)
                with contextlib.suppress(Exception):  # the default may be beyond a tiny vocabulary
                    subject.check()
                    break
        read = frozenset(_keys_read(subject, subject.keys()))
        if subject.mixed_layers:
            with contextlib.suppress(Exception):  # a class that has one kind of layer alone
                read |= _keys_read(subject, subject.keys(layer_types=subject.mixed_layers))
        odd = {key: value for key, value in ODD.items() if key in read and has_field(key)}
        odd |= {key: ODD[end] for key in read if (end := key.rpartition(".")[2]) in ODD and key in subject.defaults}
        subject = dataclasses.replace(subject, sizes={**sizes, **odd}, read=read)
        for key in sorted(read & subject.defaults.keys()):
            if subject.defaults[key] is False and _adds_norms(subject, key):
                subject = dataclasses.replace(subject, sizes={**subject.sizes, key: True})
        # Another width than the heads' share of the model, where a config may name it.
        if "head_dim" in read and LATENT not in sizes:
            wide = dataclasses.replace(subject, sizes={**subject.sizes, "head_dim": 24})
            with contextlib.suppress(Exception):
                if wide.shapes(wide.keys()) != subject.shapes(subject.keys()):
                    wide.check()
                    subject = wide
        subject.check()
    except DerivationError:
        raise
    except Exception as error:
        line = printable(str(error).partition("\n")[0], 200)
        raise DerivationError(
            f"{architecture}: no tiny instance can be made ({type(error).__name__}: {line})"
        ) from error
    return subject


@functools.cache
def _common_keys() -> frozenset[str]:
    """Return the keys of every config, whatever its class."""
    return frozenset(importlib.import_module("transformers").PreTrainedConfig().to_dict()) | {"model_type"}


def _of_whole(model_type: str) -> str | None:
    """Return the causal class of a multimodal model with a text model of this type; None where no model has one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        text = CONFIG_MAPPING[name].sub_configs.get("text_config")
        if getattr(text, "model_type", None) == model_type:
            return architecture
    return None


def _adds_norms(subject: ModelClass, key: str) -> bool:
    """Return whether a key that is false switches norms on, and nothing else."""
    try:
        usual, other = subject.shapes(subject.keys()), subject.shapes(subject.keys(**{key: True}))
    except Exception:  # a class that refuses it
        return False
    added = other.keys() - usual.keys()
    return (
        bool(added)
        and usual.keys() <= other.keys()
        and all(name.endswith("norm.weight") and len(other[name]) == 1 for name in added)
    )


def _keys_read(subject: ModelClass, keys: Mapping[str, object]) -> set[str]:
    """Return the keys of the config that an instance reads."""
    config = subject.config(keys)
    parts = {key: type(getattr(config, key)) for key in subject.nested}
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(_recorded(type(config)))
        inner = {key: stack.enter_context(_recorded(part)) for key, part in parts.items()}
        stack.enter_context(promoted())
        stack.enter_context(torch.no_grad())
        model = subject.model_class(config).eval().double()
        model(torch.tensor([[3, 5, 4, 7, 6, 9]]))
    seen |= {f"{outer}.{key}" for outer, keys in inner.items() for key in keys} & subject.defaults.keys()
    ignored = {"to_dict", "model_type", "dtype", "torch_dtype", "architectures", "use_cache", "return_dict"}
    names = getattr(subject.config_class, "attribute_map", {})
    return {names.get(key, key) for key in seen if not key.startswith("_")} - ignored - parts.keys()


@contextlib.contextmanager
def _recorded(kind: type[Any]) -> Iterator[set[str]]:
    """Record the names of attributes that are read of objects of a class, those that it lacks included."""
    seen: set[str] = set()
    plain: Any = kind.__getattribute__

    def recording(self: object, name: str) -> Any:
        seen.add(name)
        return plain(self, name)

    kind.__getattribute__ = recording  # type: ignore[assignment]  # put back below
    try:
        yield seen
    finally:
        if "__getattribute__" in vars(kind):
            del kind.__getattribute__
