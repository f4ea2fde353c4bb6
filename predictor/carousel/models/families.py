"""What each model family is: from a Hugging Face config dict to the one ``DecoderConfig`` that the decoder reads.

A config file may leave out whatever equals its config class's default, so each family carries those defaults. GGUF
metadata is first turned into the same dict (see ``gguf``), so a family is described once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedModel
from .rope import RopeConfig, rope_config

__all__ = ["FAMILIES", "DecoderConfig", "UnsupportedModel", "decoder_config", "supported_architectures"]

Hf = dict[str, Any]


@dataclass(frozen=True)
class DecoderConfig:
    """Everything the decoder must know; the per-layer tuples have ``num_layers`` entries.

    ropes: None for a layer without positions. sliding_windows: tokens a position sees, itself included; None for all.
    attention_scale multiplies the scores; attention_softcap and final_softcap are c in c * tanh(x / c).
    embedding_scale and residual_scale multiply the embeddings and each branch's output; logit_scale the logits.
    norm_offset: norms multiply by 1 + weight. post_norms: the branches' outputs are normed too.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    ropes: tuple[RopeConfig | None, ...]
    sliding_windows: tuple[int | None, ...]
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: bool = False
    tie_word_embeddings: bool = False

    @property
    def default_model_len(self) -> int:
        """Tokens of context to serve when the user does not say: the model's own, stretched where YaRN says so."""
        lengths = [rope.default_length for rope in self.ropes if rope is not None]
        return max([self.max_position_embeddings, *lengths])


@dataclass(frozen=True)
class _Family:
    """``defaults``: the config class's. ``adapt`` receives the completed config and returns DecoderConfig fields."""

    class_name: str
    defaults: Hf
    adapt: Callable[[Hf], dict[str, Any]]
    theta: float = 10_000.0


_COMMON: Hf = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN: Hf = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: Hf = _COMMON | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}


def _biases(hf: Hf) -> dict[str, Any]:
    attention, mlp = bool(hf.get("attention_bias")), bool(hf.get("mlp_bias"))
    return {"qkv_bias": attention, "output_bias": attention, "mlp_bias": mlp}


def _granite(hf: Hf) -> dict[str, Any]:
    return _biases(hf) | {
        "embedding_scale": float(hf.get("embedding_multiplier", 1.0)),
        "residual_scale": float(hf.get("residual_multiplier", 1.0)),
        "attention_scale": float(hf.get("attention_multiplier", 1.0)),
        "logit_scale": 1.0 / float(hf.get("logits_scaling", 1.0)),
    }


def _one_window(hf: Hf) -> dict[str, Any]:
    """Mistral and Phi-3: the window, where there is one, is every layer's."""
    return {"sliding_windows": (hf.get("sliding_window"),) * hf["num_hidden_layers"]}


def _by_layer_type(hf: Hf, default: Callable[[int], bool]) -> dict[str, Any]:
    """Windows for the layers that ``layer_types`` calls sliding, or, where it is absent, that ``default(i)`` does."""
    layers = hf["num_hidden_layers"]
    types = hf.get("layer_types") or ["sliding_attention" if default(i) else "full_attention" for i in range(layers)]
    window = hf.get("sliding_window")
    return {"sliding_windows": tuple(window if t == "sliding_attention" else None for t in types[:layers])}


def _qwen(hf: Hf) -> dict[str, Any]:
    hf["sliding_window"] = hf["sliding_window"] if hf.get("use_sliding_window") else None
    return _by_layer_type(hf, lambda i: i >= hf["max_window_layers"])


def _qwen2(hf: Hf) -> dict[str, Any]:
    return _qwen(hf) | {"qkv_bias": True}


def _qwen3(hf: Hf) -> dict[str, Any]:
    return _qwen(hf) | _biases(hf) | {"qk_norm": True}


def _smollm3(hf: Hf) -> dict[str, Any]:
    layers = hf["num_hidden_layers"]
    every = hf.get("no_rope_layer_interval", 4)
    rotates = hf.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    hf["no_rope_layers"] = rotates
    if not hf.get("use_sliding_window"):
        hf["sliding_window"] = None
    return _biases(hf) | _by_layer_type(hf, lambda i: not rotates[i])


def _gemma(hf: Hf) -> dict[str, Any]:
    return _biases(hf) | {
        "attention_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "final_softcap": hf.get("final_logit_softcapping"),
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "norm_offset": True,
        "post_norms": True,
    }


def _gemma2(hf: Hf) -> dict[str, Any]:
    windows = _by_layer_type(hf, lambda i: i % 2 == 0)
    return _gemma(hf) | windows | {"attention_softcap": hf.get("attn_logit_softcapping")}


def _gemma3(hf: Hf) -> dict[str, Any]:
    pattern = hf.get("sliding_window_pattern", 6)
    return _gemma(hf) | _by_layer_type(hf, lambda i: (i + 1) % pattern != 0) | {"qk_norm": True}


FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", _COMMON, _biases),
    "mistral": _Family(
        "MistralForCausalLM",
        _COMMON
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        _one_window,
    ),
    "qwen2": _Family("Qwen2ForCausalLM", _QWEN, _qwen2),
    "qwen3": _Family("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}, _qwen3),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        _GEMMA
        | {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _gemma2,
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        _GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072},
        _gemma3,
        theta=1_000_000.0,
    ),
    "phi3": _Family(
        "Phi3ForCausalLM",
        _COMMON
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        _one_window,
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        _COMMON
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        _smollm3,
        theta=2_000_000.0,
    ),
    "granite": _Family("GraniteForCausalLM", _COMMON, _granite),
}

_GEMMA3_LOCAL_THETA = 10_000.0
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def supported_architectures() -> tuple[str, ...]:
    """The class names that ``decoder_config`` accepts, as written in config.json's ``architectures``."""
    return (*(family.class_name for family in FAMILIES.values()), "Gemma3ForConditionalGeneration (its text part)")


def _text_config(hf: Hf) -> Hf:
    """A Gemma 3 with vision keeps its text model's config, often without a model_type, in ``text_config``."""
    if hf.get("model_type") == "gemma3" and isinstance(hf.get("text_config"), dict):
        return (
            {"tie_word_embeddings": hf.get("tie_word_embeddings", True)}
            | hf["text_config"]
            | {"model_type": "gemma3_text"}
        )
    return hf


def _model_type(hf: Hf) -> str:
    by_class = {family.class_name: model_type for model_type, family in FAMILIES.items()}
    named = [str(name) for name in hf.get("architectures") or ()]
    model_type = hf.get("model_type")
    if model_type is None and named:
        model_type = by_class.get(named[0])
    if model_type not in FAMILIES:
        raise UnsupportedModel(named[0] if named else repr(hf.get("model_type")), supported_architectures())
    # A model with another head (a classifier, a reward model) has the same model_type.
    if named and not any(name in by_class or name == "Gemma3ForConditionalGeneration" for name in named):
        raise UnsupportedModel(named[0], supported_architectures())
    return str(model_type)


def _rope_parameters(hf: Hf, model_type: str, layer_type: str, theta: float) -> tuple[Mapping[str, Any], float]:
    """The RoPE parameters of a layer type, and the theta to use where they have none.

    New spelling: ``rope_parameters``, flat or by layer type. Old: ``rope_theta`` + ``rope_scaling``, and Gemma 3's
    ``rope_local_base_freq`` for the sliding layers, which are never scaled.
    """
    local = model_type == "gemma3_text" and layer_type == "sliding_attention"
    parameters = dict(hf.get("rope_parameters") or {})
    if "full_attention" in parameters or "sliding_attention" in parameters:
        parameters = dict(parameters.get(layer_type) or {})
    elif local:
        parameters = {}
    if not local:
        parameters = parameters | (hf.get("rope_scaling") or {})
        theta = hf.get("rope_theta") or theta
    else:
        theta = hf.get("rope_local_base_freq") or _GEMMA3_LOCAL_THETA
    if model_type == "phi3":
        if parameters.get("rope_type", parameters.get("type")) == "yarn":
            parameters |= {"rope_type": "longrope"}  # early Phi-3 files say yarn and mean longrope
        parameters["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    elif hf.get("original_max_position_embeddings"):
        parameters.setdefault("original_max_position_embeddings", hf["original_max_position_embeddings"])
    if hf.get("partial_rotary_factor"):
        parameters.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    return parameters, theta


def _ropes(hf: Hf, model_type: str, head_dim: int, windows: tuple[int | None, ...]) -> tuple[RopeConfig | None, ...]:
    by_type: dict[str, RopeConfig] = {}
    types = hf.get("layer_types") or ["full_attention" if w is None else "sliding_attention" for w in windows]
    for layer_type in set(types):
        parameters, theta = _rope_parameters(hf, model_type, layer_type, FAMILIES[model_type].theta)
        by_type[layer_type] = rope_config(
            parameters, head_dim=head_dim, theta=theta, max_length=hf["max_position_embeddings"]
        )
    rotates = hf.get("no_rope_layers") or [True] * len(windows)
    return tuple(by_type[t] if r else None for t, r in zip(types, rotates, strict=False))


# What a config may say, checked before anything of that size is made. Real models use a tenth of each at most.
_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 21,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
    "original_max_position_embeddings": 1 << 31,
    "sliding_window_pattern": 1 << 12,
    "no_rope_layer_interval": 1 << 12,
    "query_pre_attn_scalar": 1 << 18,
}
_POSITIVE = (
    *("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "logits_scaling"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
_FINITE = ("rms_norm_eps", "embedding_multiplier", "residual_multiplier", "attention_multiplier")


def _check(hf: Hf) -> None:
    """ValueError, naming field and value, for a size or a factor that no model has."""
    for name, most in _SIZES.items():
        value = hf.get(name)
        if value is not None and (isinstance(value, bool) or value != int(value) or not 0 < value <= most):
            raise ValueError(f"{name} is {_short(value)}, allowed: an integer from 1 to {most}")
    for name in (*_POSITIVE, *_FINITE):
        value = hf.get(name)
        if value is None:
            continue
        fits = not isinstance(value, bool) and abs(value) < 1e30 and (value > 0 or (name in _FINITE and value >= 0))
        if not fits:
            raise ValueError(f"{name} is {_short(value)}, allowed: a finite number above 0")
    layers = hf["num_hidden_layers"]
    for name in ("layer_types", "no_rope_layers"):
        given = hf.get(name)
        if given and (not isinstance(given, list) or len(given) < layers):
            raise ValueError(
                f"{name} is {_short(given)}, allowed: a list with an entry for each of the {layers} layers"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def decoder_config(hf: Hf) -> DecoderConfig:
    """The decoder's view of a model config.

    Args:
        hf: a config.json as a dict (old or new spelling of RoPE), or what ``gguf.hf_config`` makes of GGUF metadata.
            A ``gemma3`` config with a ``text_config`` yields its text part.

    Raises:
        UnsupportedModel: the architecture is not one of ``supported_architectures()``.
        ValueError: a field has a value that the decoder does not know; the message names field and value.
    """
    hf = _text_config(hf)
    model_type = _model_type(hf)
    family = FAMILIES[model_type]
    hf = family.defaults | {key: value for key, value in hf.items() if value is not None or key == "sliding_window"}
    _check(hf)
    heads, layers = int(hf["num_attention_heads"]), int(hf["num_hidden_layers"])
    head_dim = int(hf.get("head_dim") or hf["hidden_size"] // heads)
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    if hf.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: an encoder cannot generate text")
    fields: dict[str, Any] = {"sliding_windows": (None,) * layers, "attention_scale": head_dim**-0.5}
    fields |= family.adapt(hf)
    return DecoderConfig(
        architecture=family.class_name,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=int(hf["max_position_embeddings"]),
        rms_norm_eps=float(hf["rms_norm_eps"]),
        activation=_ACTIVATIONS[activation],
        ropes=_ropes(hf, model_type, head_dim, fields["sliding_windows"]),
        tie_word_embeddings=bool(hf["tie_word_embeddings"]),
        **fields,
    )
