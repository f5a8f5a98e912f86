"""Hugging Face folders (config.json and *.safetensors) of Qwen3-MoE and Qwen3, without torch.

`stored_parameters` is the one table between our parameters and their tensors. Weights are read as
slices of memory-mapped files, so that a host touches only what its own shards need.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open

from gspo_jax.model.transformer import Policy, PolicyConfig

_LISTED = 40  # wrong tensors that an error spells out
_FLOATS = ("F32", "BF16", "F16")  # stored types that float32 holds exactly
_NUMBERS = {int: "an integer", float: "a number", bool: "true or false"}


# --- The configuration ---------------------------------------------------------------------------


def read_config(folder: str | Path, **overrides: Any) -> PolicyConfig:
    """The shape of the policy in `folder`, from its config.json.

    Keys that the file leaves out have the defaults of `transformers` where those are harmless, and
    are errors otherwise.

    Args:
      folder: holds config.json, of model type qwen3_moe or qwen3.
      overrides: fields of PolicyConfig, mostly those no file holds: compute_dtype, remat, unroll.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: the model is of another type, uses what is not supported, or the file is wrong.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: name a folder that transformers has written")
    try:
        config = _to_config(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    fields = [field.name for field in dataclasses.fields(PolicyConfig)]
    for name in overrides.keys() - set(fields):
        raise ValueError(f"{name} = {overrides[name]!r}: a policy has only {', '.join(fields)}")
    return dataclasses.replace(config, **overrides)


def _to_config(raw: dict[str, Any]) -> PolicyConfig:
    _refuse_unsupported(raw)
    moe = raw["model_type"] == "qwen3_moe"
    number = functools.partial(_number, raw)
    width, heads = number(int, "hidden_size"), number(int, "num_attention_heads")
    config = PolicyConfig(
        vocab_size=number(int, "vocab_size"),
        hidden_size=width,
        num_layers=number(int, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number(int, "num_key_value_heads"),
        head_dim=number(int, "head_dim", default=width // heads),
        num_experts=number(int, "num_experts", "num_local_experts", least=0) if moe else 0,
        experts_per_token=number(int, "num_experts_per_tok", least=0) if moe else 0,
        expert_width=number(int, "moe_intermediate_size", least=0) if moe else 0,
        dense_width=number(int, "intermediate_size", default=0, least=0),
        dense_layers=tuple(raw.get("mlp_only_layers") or ()) if moe else (),
        sparse_step=number(int, "decoder_sparse_step", default=1) if moe else 1,
        norm_topk=number(bool, "norm_topk_prob", default=False),
        tied=number(bool, "tie_word_embeddings", default=False),
        rope_theta=_rope_theta(raw),
        norm_eps=number(float, "rms_norm_eps", default=1e-6),
        max_positions=number(int, "max_position_embeddings", default=32768),
    )
    for wrong in _contradictions(config):
        raise ValueError(wrong)
    return config


def _number(
    raw: dict[str, Any], kind: type, *keys: str, default: Any = None, least: int = 1
) -> Any:
    """The value of the first key that is there and not null; integers are `least` or more."""
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, kind)):
            raise ValueError(f"{key} = {value!r}: {_NUMBERS[kind]} is needed")
        if kind is int and value < least:
            raise ValueError(f"{key} = {value}: it must be at least {least}")
        return kind(value)
    if default is None:
        raise ValueError(f"{' or '.join(keys)} is missing: add it, or save the model again")
    return default


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    def refuse(key: str, value: Any, remedy: str) -> None:
        raise ValueError(f"{key} = {value!r} is not supported: {remedy}")

    kind = raw.get("model_type")
    if kind not in ("qwen3_moe", "qwen3"):
        refuse("model_type", kind, "it must be 'qwen3_moe' or 'qwen3'")
    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", raw["hidden_act"], "experts are SwiGLU, 'silu'")
    if raw.get("attention_bias"):
        refuse("attention_bias", raw["attention_bias"], "projections have no bias; use false")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        refuse("quantization_config", method, "take the bf16 or float32 weights of this model")
    if raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        refuse("sliding_window", raw["sliding_window"], "attention sees all; set it to null")
    for layer in raw.get("layer_types") or ():
        if layer != "full_attention":
            refuse("layer_types", layer, "every layer must have 'full_attention'")
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling != "default":
            refuse(f"{key}.rope_type", scaling, "positions are not scaled; use 'default'")
        if rope.get("partial_rotary_factor", 1) != 1:
            refuse(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "use 1")


def _rope_theta(raw: dict[str, Any]) -> float:
    """From rope_parameters (transformers 5) or the top level (4), which must not disagree."""
    spellings = (raw.get("rope_parameters") or {}, raw)
    thetas = {_number(r, float, "rope_theta") for r in spellings if "rope_theta" in r}
    if len(thetas) > 1:
        raise ValueError(f"rope_theta = {sorted(thetas)} in two places: remove the wrong one")
    return thetas.pop() if thetas else _number(raw, float, "rope_theta")


def _contradictions(c: PolicyConfig) -> Iterator[str]:
    """Values that do not go together."""
    if c.num_heads % c.num_kv_heads:
        yield (
            f"num_key_value_heads = {c.num_kv_heads}: it must divide num_attention_heads, "
            f"{c.num_heads}"
        )
    if c.head_dim % 2:
        yield f"head_dim = {c.head_dim}: rotary positions need an even number"
    for layer in c.dense_layers:
        if type(layer) is not int or not 0 <= layer < c.num_layers:
            yield f"mlp_only_layers names {layer!r}: layers are 0 … {c.num_layers - 1}"
    if c.num_sparse_layers and not 1 <= c.experts_per_token <= c.num_experts:
        yield (
            f"num_experts_per_tok = {c.experts_per_token}: it must lie in [1, {c.num_experts}], "
            "the number of experts"
        )
    if c.num_sparse_layers and not c.expert_width:
        yield f"moe_intermediate_size = {c.expert_width}: layers with experts need it"
    if c.num_sparse_layers < c.num_layers and not c.dense_width:
        yield f"intermediate_size = {c.dense_width}: layers without experts need it"


# --- Names ---------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """How one of our parameters is stored: as one tensor for each layer, or layer and expert.

    `axes` relates our axes, less the stacked ones, to the tensor's: "dnh -> nh d" says that
    ours is [D, N, H] and theirs [N * H, D].
    """

    name: str  # of the tensors, with a {} for each stacked axis
    axes: str
    stacked: tuple[range, ...] = ()  # the ids that go into the name: layers, experts

    @property
    def ours(self) -> str:
        """Our axes."""
        return self.axes.split(" -> ")[0]

    @property
    def theirs(self) -> list[str]:
        """Their axes, each the product of some of ours."""
        return self.axes.split(" -> ")[1].split()

    def names(self) -> Iterator[str]:
        """All tensors, in the order in which they are stacked."""
        return (self.name.format(*ids) for ids in itertools.product(*self.stacked))

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor, given that of our whole parameter."""
        size = dict(zip(self.ours, shape[len(self.stacked) :], strict=True))
        return tuple(math.prod(size[axis] for axis in group) for group in self.theirs)


_WHOLE = {
    "embedding": ("model.embed_tokens.weight", "vd -> v d"),
    "norm": ("model.norm.weight", "d -> d"),
    "head": ("lm_head.weight", "vd -> v d"),
}
_LAYER = {
    "attention_norm": ("input_layernorm.weight", "d -> d"),
    "attention.query": ("self_attn.q_proj.weight", "dnh -> nh d"),
    "attention.key": ("self_attn.k_proj.weight", "dnh -> nh d"),
    "attention.value": ("self_attn.v_proj.weight", "dnh -> nh d"),
    "attention.out": ("self_attn.o_proj.weight", "nhd -> d nh"),
    "attention.query_norm": ("self_attn.q_norm.weight", "h -> h"),
    "attention.key_norm": ("self_attn.k_norm.weight", "h -> h"),
    "ffn_norm": ("post_attention_layernorm.weight", "d -> d"),
}
_DENSE = {
    "ffn.gate": ("mlp.gate_proj.weight", "df -> f d"),
    "ffn.up": ("mlp.up_proj.weight", "df -> f d"),
    "ffn.down": ("mlp.down_proj.weight", "fd -> d f"),
}
_SPARSE = {
    "ffn.router": ("mlp.gate.weight", "de -> e d"),
    "ffn.gate": ("mlp.experts.{}.gate_proj.weight", "df -> f d"),
    "ffn.up": ("mlp.experts.{}.up_proj.weight", "df -> f d"),
    "ffn.down": ("mlp.experts.{}.down_proj.weight", "fd -> d f"),
}


def stored_parameters(config: PolicyConfig) -> dict[str, Stored]:
    """The table: each parameter of the policy, by its path in it (`stacks[0].attention.query`)."""
    table = {
        path: Stored(name, axes)
        for path, (name, axes) in _WHOLE.items()
        if not (config.tied and path == "head")
    }
    first = 0
    for stack, (sparse, layers) in enumerate(config.stacks):
        for path, (name, axes) in (_LAYER | (_SPARSE if sparse else _DENSE)).items():
            stacked = (range(first, first + layers), range(config.num_experts))
            table[f"stacks[{stack}].{path}"] = Stored(
                f"model.layers.{{}}.{name}", axes, stacked[: 1 + name.count("{}")]
            )
        first += layers
    return table


# --- The weights ---------------------------------------------------------------------------------


def load_policy(folder: str | Path, config: PolicyConfig) -> Policy:
    """The policy stored in `folder`, in float32, laid out on the current mesh.

    Args:
      folder: holds *.safetensors (float32, bfloat16 or float16), and model.safetensors.index.json
        if there are several; then only the files it names are read.
      config: as from `read_config(folder)`.

    Raises:
      FileNotFoundError: there are no weights, or a file that the index names is missing.
      ValueError: tensors are missing, superfluous, misshapen or of a type that is not read; all of
        them are named. Or a file is damaged, or no mesh is set.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("no mesh is set: load a policy under `jax.set_mesh(make_mesh(...))`")
    target = jax.eval_shape(lambda: Policy(config, nnx.Rngs(0)))
    table = stored_parameters(config)
    leaves, structure = jax.tree.flatten_with_path(target)
    # An NNX variable is a node with the one leaf `value`.
    wanted = {jax.tree_util.keystr(path)[1:].removesuffix(".value"): x for path, x in leaves}
    with contextlib.ExitStack() as stack:
        tensors = _open(Path(folder), stack)
        if config.tied:  # some files hold it all the same; like transformers, do without it
            tensors.pop(_WHOLE["head"][0], None)
        _compare(folder, tensors, {table[path]: x.shape for path, x in wanted.items()})
        loaded = [_load(table[path], tensors, x, mesh) for path, x in wanted.items()]
    return jax.tree.unflatten(structure, loaded)


def _open(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Every tensor as a slice that has not been read; the files stay open for `stack`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        absent = sorted(file.name for file in files if not file.is_file())
        if absent:
            raise FileNotFoundError(f"{index} names files that are missing: {', '.join(absent)}")
    else:
        files = set(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors: other formats are not read")
    tensors: dict[str, Any] = {}
    for file in sorted(files):
        try:
            handle = stack.enter_context(safe_open(file, "numpy"))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged, copy it again: {error}") from None
        names = handle.keys()
        for name in tensors.keys() & set(names):
            raise ValueError(f"{name} is in {file} and in another file: remove what is stale")
        tensors |= {name: handle.get_slice(name) for name in names}
    return tensors


def _compare(
    folder: str | Path, tensors: dict[str, Any], wanted: dict[Stored, tuple[int, ...]]
) -> None:
    """Raises if the files hold other tensors than the policy needs."""
    shapes = {name: s.tensor_shape(shape) for s, shape in wanted.items() for name in s.names()}
    lines = [f"{name}: missing, wanted {list(shapes[name])}" for name in shapes.keys() - tensors]
    lines += [f"{name}: of no use to this policy" for name in tensors.keys() - shapes]
    for name in shapes.keys() & tensors:
        found, dtype = tuple(tensors[name].get_shape()), tensors[name].get_dtype()
        if found != shapes[name]:
            lines.append(f"{name}: {list(found)}, wanted {list(shapes[name])}")
        if dtype not in _FLOATS:
            lines.append(f"{name}: {dtype}, wanted {', '.join(_FLOATS)}")
    if lines:
        more = [f"… and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        raise ValueError(
            "\n  ".join([f"{folder}: {len(lines)} tensors differ", *sorted(lines)[:_LISTED], *more])
            + "\nUse the weights and the config.json of one and the same model."
        )


def _load(
    stored: Stored, tensors: dict[str, Any], target: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh
) -> jax.Array:
    """One parameter, each shard read on its own."""

    @functools.cache  # devices that hold the same part share it
    def shard(index: tuple[slice, ...]) -> np.ndarray:
        return _read(stored, tensors, target.shape, index)

    sharding = NamedSharding(mesh, target.sharding.spec)
    return jax.make_array_from_callback(target.shape, sharding, shard, dtype=target.dtype)


def _read(
    stored: Stored, tensors: dict[str, Any], shape: tuple[int, ...], index: tuple[slice, ...]
) -> np.ndarray:
    """The part `index` of our parameter of `shape`, in float32."""
    lead = len(stored.stacked)
    ids = [all_ids[some] for all_ids, some in zip(stored.stacked, index[:lead], strict=True)]
    size = dict(zip(stored.ours, shape[lead:], strict=True))
    part = {a: range(size[a])[some] for a, some in zip(stored.ours, index[lead:], strict=True)}
    where = []
    for first, *rest in stored.theirs:
        if any(len(part[axis]) < size[axis] for axis in rest):
            raise ValueError(f"{stored.name}: of {stored.axes}, a mesh may split {first} only")
        step = math.prod(size[axis] for axis in rest)
        where.append(slice(part[first].start * step, part[first].stop * step))
    order = "".join(stored.theirs)
    out = np.empty([len(x) for x in (*ids, *part.values())], np.float32)
    for position in np.ndindex(out.shape[:lead]):
        name = stored.name.format(*(some[i] for some, i in zip(ids, position, strict=True)))
        tensor = tensors[name][tuple(where)].astype(np.float32)
        tensor = tensor.reshape([len(part[axis]) for axis in order])
        out[position] = tensor.transpose([order.index(axis) for axis in stored.ours])
    return out
