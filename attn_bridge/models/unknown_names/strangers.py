"""Names of other programs' tensors, which no layout takes: the program, and how its weights get names that one does."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...printable import printable

_PROGRAMS = (
    (r"transformer\.h\.\d+\.attn\.(qkv|attn)\.weight", "LitGPT: litgpt convert_from_litgpt gives its weights the "
     "names of transformers; convert what that writes"),
    (r"((de|en)coder\.layers\.\d+\.self_attention\.linear_qkv|encoder\.layers\.\d+\.self_attention\.query_key_value)"
     r"\.weight", "Megatron: the export to transformers of Megatron-Bridge (AutoBridge.export_ckpt) makes a folder of "
     "it; convert that"),
    (r"decoder\.blocks\.\d+\.cross_attn\.query\.weight", "OpenAI's whisper: convert the same model of the hub "
     "(openai/whisper-...), or what transformers' convert_openai_to_hf.py of whisper makes of this"),
    (r"blocks\.\d+\.attn\.W_Q", "TransformerLens, which may have folded norms into it: convert the model that it was "
     "made of"),
    (r"shadow_params\.\d+", "an average that torch_ema or diffusers' EMAModel saves as a list without names: copy it "
     "into the model (copy_to), and save that model's state_dict"),
    (r".+:0", "TensorFlow, as in tf_model.h5 of transformers: transformers 4 loads that by from_pretrained(FOLDER, "
     "from_tf=True), and save_pretrained writes a folder to convert"),
)  # fmt: skip
"""Pattern of a name, or of its end after a dot -> the program that it is of, and a remedy."""

_COMPUTED = (
    (".parametrizations.{}.original", "", "a parametrization of torch computes {} from it: "
     "torch.nn.utils.parametrize.remove_parametrizations(module, {!r})"),
    (".parametrizations.{}.original0", "", "a parametrization of torch computes {} from it: "
     "torch.nn.utils.parametrize.remove_parametrizations(module, {!r})"),
    (".{}_orig", ".{}_mask", "torch.nn.utils.prune masks {}: prune.remove(module, {!r})"),
    (".{}_orig", ".{}_u", "torch's spectral_norm computes {} from it: "
     "torch.nn.utils.remove_spectral_norm(module, {!r})"),
    (".{}_g", ".{}_v", "torch's weight_norm computes {} from it: torch.nn.utils.remove_weight_norm(module, {!r})"),
)  # fmt: skip
"""Ending of a name, ending of a second name, and what computes the tensor ``{}`` of them, with the call to undo it."""


def why_computed(names: Iterable[str]) -> str:
    """Return why a weight is not in the file but made of others in each call, and the remedy; "" if none is."""
    names = set(names)
    for name in sorted(names):
        for own in ("weight", "bias"):
            for ending, beside, text in _COMPUTED:
                front = name.removesuffix(ending.format(own))
                if front != name and front + (beside or ending).format(own) in names:
                    remedy = text.format(printable(f"{front}.{own}"), own)
                    return f"{printable(name)}: {remedy} makes it a plain tensor again; save the state_dict after that"
    return ""


def why(names: Iterable[str]) -> str:
    """Return the program that names are of and a remedy, with the first such name; "" if it is not known."""
    names = list(names)
    for pattern, program in _PROGRAMS:
        match = re.compile(rf"(?:.*\.)?(?:{pattern})").fullmatch
        name = next(filter(match, names), "")
        if name:
            return f"{printable(name)} is of {program}"
    return ""
