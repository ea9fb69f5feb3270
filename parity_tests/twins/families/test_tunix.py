"""Tunix: its Orbax folders, its files as models of ours, and, where it can be imported, its own models' logits."""

from __future__ import annotations

import functools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import checkpoints

from ...support.calls import cover
from ...support.models import tunix_models
from ...support.models.tunix_models import CASES

IDS = np.random.default_rng(5).integers(0, 31, size=(2, 9))
BACKENDS = {"torch": torch_attn, "flax": jax_attn}


@functools.cache
def transformers_model(name, seed=0):
    """Return a model of `transformers` whose weights hide nothing."""
    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.model_type, **case.sizes, experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model


def saved(folder, name):
    """Write the folder of a case as `transformers` has it, and as tunix names it, and return what the latter holds."""
    transformers_model(name).save_pretrained(folder / "hf")
    checkpoints.convert(folder / "hf", folder / "tunix", to_layout=CASES[name].layout)
    return checkpoints.read(folder / "tunix")


def state(arrays):
    """Return arrays as NNX has the state of a model."""
    leaves = {tuple(int(one) if one.isdigit() else one for one in name.split(".")): nnx.Param(jax.numpy.asarray(array))
              for name, array in arrays.items()}  # fmt: skip
    return nnx.from_flat_state(leaves)


def logits_of_ours(model, backend):
    if backend == "flax":
        return np.asarray(nnx.jit(lambda model, ids: model(ids))(model, jax.numpy.asarray(IDS)))
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).numpy()


def logits_of_theirs(model):
    with torch.no_grad():
        return model(torch.from_numpy(IDS), use_cache=False).logits.numpy()


def noise(name):
    """Return the logits of `transformers` in float64, and how far its own float32 is from them."""
    model = transformers_model(name)
    single = logits_of_theirs(model)
    double = transformers.AutoModelForCausalLM.from_config(model.config).eval().double()
    double.load_state_dict(model.state_dict())
    exact = logits_of_theirs(double)
    return exact, np.abs(single - exact).max()


# ---- Orbax


@cover.rotated(("name", "way"), ["llama3", "qwen2", "qwen3-moe", "gemma3"], ["standard", "step of tunix", "pure dict"])
def test_an_orbax_state_round_trips_through_transformers(tmp_path, name, way):
    arrays, case = saved(tmp_path, name), CASES[name]
    held = state(arrays)
    if way == "step of tunix":
        handlers = {"model_params": ocp.PyTreeCheckpointHandler(), "custom_metadata": ocp.JsonCheckpointHandler()}
        with ocp.CheckpointManager(tmp_path / "run", item_handlers=handlers) as manager:
            save_args = jax.tree.map(lambda _: ocp.SaveArgs(), held)
            manager.save(3, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(held, save_args=save_args)))
            manager.wait_until_finished()
        source = tmp_path / "run" / "3"
    else:
        source = tmp_path / "saved"
        with ocp.StandardCheckpointer() as one:
            one.save(source, nnx.to_pure_dict(held) if way == "pure dict" else held)
    found = checkpoints.inspect(source)
    assert (found.format, found.layout) == ("orbax", case.layout)
    assert all(key.endswith(".value") for key in found.tensors) == (way != "pure dict")
    (source / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    checkpoints.convert(source, tmp_path / "back", to_layout=case.theirs)
    wanted, got = (checkpoints.read(tmp_path / one) for one in ("hf", "back"))
    assert wanted.keys() == got.keys()
    assert all(np.array_equal(wanted[key], got[key]) for key in wanted)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", experts_implementation="eager")
    assert np.array_equal(logits_of_theirs(loaded), logits_of_theirs(transformers_model(name)))
    checkpoints.convert(tmp_path / "back", tmp_path / "again.orbax", to_layout=case.layout)
    blank = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding), held)
    with ocp.StandardCheckpointer() as one:
        restored = one.restore(tmp_path / "again.orbax", nnx.to_pure_dict(blank) if way == "pure dict" else blank)
    same = jax.tree.map(np.array_equal, restored, nnx.to_pure_dict(held) if way == "pure dict" else held)
    assert all(jax.tree.leaves(same))


# ---- ours


@cover.rotated(("name", "backend"), list(CASES), list(BACKENDS))
def test_a_tunix_folder_with_a_config_loads(tmp_path, name, backend):
    saved(tmp_path, name)
    kind = BACKENDS[backend].DecoderModel
    found = logits_of_ours(kind.from_pretrained(tmp_path / "tunix"), backend)
    assert np.array_equal(found, logits_of_ours(kind.from_pretrained(tmp_path / "hf"), backend))
    exact, own = noise(name)
    assert np.abs(found - exact).max() <= 16 * own


@cover.rotated(("name", "backend"), ["llama3-tied", "gemma3-own-keys"], list(BACKENDS))
def test_our_models_round_trip_through_tunix_folders(tmp_path, name, backend):
    arrays, package = saved(tmp_path, name), BACKENDS[backend]
    model = package.DecoderModel.from_pretrained(tmp_path / "hf")
    package.checkpoints.save(model, tmp_path / "own", to_layout=CASES[name].layout)  # heads are its config's
    found = checkpoints.read(tmp_path / "own")
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[key], arrays[key]) for key in arrays)
    again = package.DecoderModel.from_pretrained(tmp_path / "own")
    assert np.array_equal(logits_of_ours(again, backend), logits_of_ours(model, backend))
    model.save_pretrained(tmp_path / "ours")
    checkpoints.convert(tmp_path / "ours", tmp_path / "other", to_layout=CASES[name].layout)
    assert np.array_equal(
        logits_of_ours(package.DecoderModel.from_pretrained(tmp_path / "other"), backend),
        logits_of_ours(model, backend),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_orbax_state_folder_loads(tmp_path, backend):
    arrays = saved(tmp_path, "qwen3")
    with ocp.StandardCheckpointer() as one:
        one.save(tmp_path / "state", state(arrays))
    (tmp_path / "state" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    kind = BACKENDS[backend].DecoderModel
    found = logits_of_ours(kind.from_pretrained(tmp_path / "state"), backend)
    assert np.array_equal(found, logits_of_ours(kind.from_pretrained(tmp_path / "hf"), backend))


# ---- tunix itself, where it can be imported


@pytest.mark.parametrize("name", CASES)
def test_tunixs_model_matches_the_stored_names_and_shapes(name):
    found = tunix_models.state_of(tunix_models.build(CASES[name]))
    assert {key: array.shape for key, array in found.items()} == tunix_models.known_states()[name]


@pytest.mark.parametrize("name", CASES)
def test_tunixs_own_loader_puts_every_bit_where_we_do(tmp_path, name):
    model, arrays = tunix_models.build(CASES[name]), saved(tmp_path, name)
    found = tunix_models.state_of(tunix_models.load(CASES[name], model, tmp_path / "hf"))
    assert found.keys() == arrays.keys()
    assert all(found[key].tobytes() == arrays[key].tobytes() for key in arrays)


@pytest.mark.parametrize("name", CASES)
def test_tunixs_own_model_gives_the_logits_of_transformers(tmp_path, name):
    model = tunix_models.build(CASES[name])
    tunix_models.put(model, saved(tmp_path, name))
    exact, own = noise(name)
    far = np.abs(tunix_models.logits(model, IDS) - exact).max()
    print(f"{name}: tunix {far:.1e}, transformers' own float32 {own:.1e}, of logits up to {np.abs(exact).max():.1f}")
    assert far <= 16 * own


@pytest.mark.parametrize("fault", ["heads of q", "keys for values", "one more in a norm"])
def test_tunixs_model_reveals_misplaced_weights(tmp_path, fault):
    arrays = saved(tmp_path, "gemma3")
    for key in [key for key in arrays if key.startswith("layers.0.")]:
        if fault == "heads of q" and key.endswith("q_einsum.w"):
            arrays[key] = arrays[key][::-1].copy()
        if fault == "keys for values" and key.endswith("kv_einsum.w"):
            arrays[key] = arrays[key][::-1].copy()
        if fault == "one more in a norm" and key.endswith("pre_ffw_norm.scale"):
            arrays[key] = arrays[key] + 1
    model = tunix_models.build(CASES["gemma3"])
    tunix_models.put(model, arrays)
    exact, own = noise("gemma3")
    assert np.abs(tunix_models.logits(model, IDS) - exact).max() > 1000 * own


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_tunixs_own_model_is_saved_converted_and_restored_by_orbax(tmp_path, name):
    saved(tmp_path, name)
    model = tunix_models.build(CASES[name])
    checkpoints.convert(tmp_path / "tunix", tmp_path / "in.orbax", to_layout="same")  # names without .value
    checkpoints.convert(tmp_path / "hf", tmp_path / "state.orbax", to_layout=CASES[name].layout, settings={"value": 1})
    with ocp.StandardCheckpointer() as one:
        nnx.update(model, one.restore(tmp_path / "state.orbax", nnx.state(model)))
        one.save(tmp_path / "out", nnx.state(model))
        pure = one.restore(tmp_path / "in.orbax", nnx.to_pure_dict(nnx.state(model)))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, pure, nnx.to_pure_dict(nnx.state(model)))))
    exact, own = noise(name)
    assert np.abs(tunix_models.logits(model, IDS) - exact).max() <= 16 * own
    checkpoints.convert(tmp_path / "out", tmp_path / "back", to_layout=CASES[name].theirs)
    wanted, got = (checkpoints.read(tmp_path / one) for one in ("hf", "back"))
    assert all(np.array_equal(wanted[key], got[key]) for key in wanted)
