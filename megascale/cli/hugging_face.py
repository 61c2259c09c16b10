"""Shapes of a Hugging Face model, by name, from its ``config.json`` alone: nothing of it is downloaded or imported."""

from collections.abc import Iterator
from typing import Any

from megascale.errors import ArgumentError

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, "qkv_bias": True},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, "head_norms": True},
}
"""Llama and models built like it, by ``model_type``, with the values that a config may leave out."""
TYPES = ("gpt2", *FAMILIES)

Named = Iterator[tuple[str, tuple[int, ...]]]


def is_config(content: Any) -> bool:
    """Whether the content of a JSON file is a model's config, not shapes by name."""
    return isinstance(content, dict) and isinstance(content.get("model_type"), str)


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the causal language model that ``config`` describes.

    Raises:
        ArgumentError: naming the model type, or the field that is missing.
    """
    kind = config["model_type"]
    if kind == "gpt2":
        return dict(_gpt2(config))
    if kind in FAMILIES:
        return dict(_llama(FAMILIES[kind] | config))
    raise ArgumentError(
        f"model_type must be one of {', '.join(TYPES)}, got {kind!r}; for another model give package.module:function, "
        "a function that returns the module, such as transformers' AutoModelForCausalLM.from_config(config)"
    )


def _number(config: dict[str, Any], name: str, default: int | None = None) -> int:
    found = config.get(name)
    found = default if found is None else found
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ArgumentError(f"field {name!r} of the config must be an integer, 1 or more, got {found!r}")
    return found


def _llama(config: dict[str, Any]) -> Named:
    width, inner, words = (_number(config, name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = _number(config, "num_attention_heads")
    size = _number(config, "head_dim", width // heads)
    queries, keys = heads * size, _number(config, "num_key_value_heads", heads) * size
    yield "model.embed_tokens.weight", (words, width)
    for index in range(_number(config, "num_hidden_layers")):
        layer = f"model.layers.{index}"
        for name, rows, columns in (
            ("q_proj", queries, width),
            ("k_proj", keys, width),
            ("v_proj", keys, width),
            ("o_proj", width, queries),
        ):
            yield f"{layer}.self_attn.{name}.weight", (rows, columns)
            if config.get("attention_bias") or (config.get("qkv_bias") and name != "o_proj"):
                yield f"{layer}.self_attn.{name}.bias", (rows,)
        if config.get("head_norms"):
            yield from ((f"{layer}.self_attn.{name}.weight", (size,)) for name in ("q_norm", "k_norm"))
        for name, rows, columns in (
            ("gate_proj", inner, width),
            ("up_proj", inner, width),
            ("down_proj", width, inner),
        ):
            yield f"{layer}.mlp.{name}.weight", (rows, columns)
            if config.get("mlp_bias"):
                yield f"{layer}.mlp.{name}.bias", (rows,)
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (words, width)


def _gpt2(config: dict[str, Any]) -> Named:
    width, words = _number(config, "n_embd"), _number(config, "vocab_size")
    inner = _number(config, "n_inner", 4 * width)
    yield "transformer.wte.weight", (words, width)
    yield "transformer.wpe.weight", (_number(config, "n_positions"), width)
    for index in range(_number(config, "n_layer")):
        layer = f"transformer.h.{index}"
        yield from _with_bias(f"{layer}.ln_1", width)
        yield from _with_bias(f"{layer}.attn.c_attn", width, 3 * width)
        yield from _with_bias(f"{layer}.attn.c_proj", width, width)
        yield from _with_bias(f"{layer}.ln_2", width)
        yield from _with_bias(f"{layer}.mlp.c_fc", width, inner)
        yield from _with_bias(f"{layer}.mlp.c_proj", inner, width)
    yield from _with_bias("transformer.ln_f", width)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (words, width)


def _with_bias(name: str, *shape: int) -> Named:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]
