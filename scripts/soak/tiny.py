"""A model of random numbers that any machine serves in milliseconds, as a directory that ``carousel serve`` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB, EOS = 320, 256
MAX_LEN = 2048
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 32, 64, 2, 4, 2
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def byte_tokenizer(*, words: bool) -> Tokenizer:
    """A token for each byte, and one for the end.

    ``words``: a prompt is cut at them first. The tokenizer caches each "word" that it has seen, and else a whole prompt
    is one.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([f"<{i}>" for i in range(VOCAB - EOS - 1)])
    return backend


def write_tokenizer(folder: Path) -> None:
    """Write the files of a tokenizer that has a token for each byte, as transformers reads them."""
    byte_tokenizer(words=True).save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tiny_model(folder: Path) -> Path:
    """Write config, tokenizer (one token per byte) and weights into ``folder``, and return it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))

    write_tokenizer(folder)
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.35

    kv_width = _HIDDEN // _HEADS * _KV_HEADS
    tensors = {
        "model.embed_tokens.weight": random(VOCAB, _HIDDEN),
        "lm_head.weight": random(VOCAB, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    for layer in range(_LAYERS):
        parts = {
            "self_attn.q_proj": random(_HIDDEN, _HIDDEN),
            "self_attn.k_proj": random(kv_width, _HIDDEN),
            "self_attn.v_proj": random(kv_width, _HIDDEN),
            "self_attn.o_proj": random(_HIDDEN, _HIDDEN),
            "mlp.gate_proj": random(_INNER, _HIDDEN),
            "mlp.up_proj": random(_INNER, _HIDDEN),
            "mlp.down_proj": random(_HIDDEN, _INNER),
            "input_layernorm": torch.ones(_HIDDEN),
            "post_attention_layernorm": torch.ones(_HIDDEN),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
