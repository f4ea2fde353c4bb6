"""The one decoder: every family's transformer as configured, on ``carousel_kernels`` operators and a paged KV cache.

This is the hot path. Whatever can be decided once is decided when a layer is built: fused and packed weights, folded
constants (Gemma's 1 + w, Granite's multipliers), which norms there are; a step only calls operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

import carousel_kernels as ck
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

from .families import DecoderConfig
from .rope import RopeConfig, cos_sin_table
from .weights import DecoderWeights, Linear, TensorSource, Weights, trim_heap

KVCache = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer K and V, each [num_blocks, 16, Hkv, D]."""

_FIRST_ROPE_ROWS = 4096

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ck.silu_mul,
    "gelu_tanh": ck.gelu_tanh_mul,
}


class _Layer:
    """Attention and MLP of one layer. ``rope`` is its table, or None for a layer without positions."""

    __slots__ = (
        "activation",
        "attention_norm",
        "down",
        "eps",
        "gate_up",
        "head_dim",
        "k_norm",
        "mlp_norm",
        "output",
        "post_attention_norm",
        "post_mlp_norm",
        "q_norm",
        "qkv",
        "rope",
        "scale",
        "sections",
        "softcap",
        "total_heads",
        "width",
        "window",
    )

    def __init__(self, index: int, weights: DecoderWeights) -> None:
        config = weights.config
        name = f"layers.{index}."
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        one = 1.0 if config.norm_offset else 0.0
        self.eps = config.rms_norm_eps
        self.head_dim = size
        self.sections = [heads, kv_heads, kv_heads]
        self.total_heads = heads + 2 * kv_heads
        self.width = heads * size
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.window = config.sliding_windows[index]
        self.activation = _ACTIVATIONS[config.activation]
        self.rope: torch.Tensor | None = None

        def norm(which: str, length: int = hidden) -> torch.Tensor:
            return weights.tensor(f"{name}{which}.weight", (length,), offset=one)

        self.attention_norm = norm("input_layernorm")
        qkv = [(f"{name}self_attn.{p}_proj", n * size) for p, n in zip("qkv", self.sections, strict=True)]
        self.qkv = _fused_linear(weights, f"{name}self_attn.qkv_proj", qkv, hidden, config.qkv_bias)
        self.output = _linear(weights, f"{name}self_attn.o_proj", hidden, self.width, config.output_bias)
        self.q_norm = norm("self_attn.q_norm", size) if config.qk_norm else None
        self.k_norm = norm("self_attn.k_norm", size) if config.qk_norm else None
        self.post_attention_norm = norm("post_attention_layernorm") if config.post_norms else None
        self.mlp_norm = norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm")
        gate_up = [(f"{name}mlp.gate_proj", inner), (f"{name}mlp.up_proj", inner)]
        self.gate_up = _fused_linear(weights, f"{name}mlp.gate_up_proj", gate_up, hidden, config.mlp_bias)
        self.down = _linear(weights, f"{name}mlp.down_proj", hidden, inner, config.mlp_bias)
        self.post_mlp_norm = norm("post_feedforward_layernorm") if config.post_norms else None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        layout: BatchLayout,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch output, residual) of the last layer -> the same of this one; only ``rows`` of it, if given."""
        if residual is None:
            residual = x
            x = ck.rms_norm(x, self.attention_norm, self.eps)
        else:
            x, residual = ck.add_rms_norm(x, residual, self.attention_norm, self.eps)
        q, k, v = self.qkv(x).view(-1, self.total_heads, self.head_dim).split(self.sections, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = ck.rms_norm(q, self.q_norm, self.eps)
            k = ck.rms_norm(k, self.k_norm, self.eps)
        if self.rope is None:
            ck.write_kv(k, v, k_cache, v_cache, layout.slots)
        else:
            ck.rope_write_kv(q, k, v, self.rope, positions, k_cache, v_cache, layout.slots)
        x = ck.paged_attention(
            q, k_cache, v_cache, layout, scale=self.scale, sliding_window=self.window, softcap=self.softcap
        ).view(-1, self.width)
        if rows is not None:
            x = x.index_select(0, rows)
            residual = residual.index_select(0, rows)
        x = self.output(x)
        if self.post_attention_norm is not None:
            x = ck.rms_norm(x, self.post_attention_norm, self.eps)
        x, residual = ck.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        x = self.down(self.activation(self.gate_up(x)))
        if self.post_mlp_norm is not None:
            x = ck.rms_norm(x, self.post_mlp_norm, self.eps)
        return x, residual


def _linear(weights: DecoderWeights, name: str, rows: int, columns: int, bias: bool) -> Linear:
    """A projection back into the residual stream, with the branch's multiplier folded in."""
    scale = weights.config.residual_scale

    def read() -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = weights.tensor(f"{name}.weight", (rows, columns), scale=scale)
        return weight, weights.tensor(f"{name}.bias", (rows,), scale=scale) if bias else None

    return weights.linear(name, (rows, columns), read)


def _fused_linear(
    weights: DecoderWeights, whole: str, parts: list[tuple[str, int]], columns: int, bias: bool
) -> Linear:
    def read() -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = weights.fused(f"{whole}.weight", [(f"{part}.weight", n) for part, n in parts], columns)
        if not bias:
            return weight, None
        return weight, weights.fused(f"{whole}.bias", [(f"{part}.bias", n) for part, n in parts], None)

    return weights.linear(whole, (sum(n for _, n in parts), columns), read)


class Decoder:
    """A loaded model: token ids in, logits out.

    Args:
        config: the family's settings.
        source: the checkpoint's tensors; each is read once, straight into its place. Or where else its weights come
            from, whose device and dtype hold then.
        device, dtype: where and in what the weights and activations are. Logits are float32 always.
        max_model_len: the longest context that will be served, in tokens; None: ``config.default_model_len``. It
            fixes the frequencies of length-dependent RoPE (see ``rope``).

    Raises:
        ModelLoadError: a tensor is missing, unexpected or has another shape.
    """

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource | DecoderWeights,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_model_len: int | None = None,
    ) -> None:
        weights = source if isinstance(source, DecoderWeights) else Weights(source, config, torch.device(device), dtype)
        self.config = config
        self.device = weights.device
        self.dtype = weights.dtype
        self.max_model_len = max_model_len or config.default_model_len
        table = (config.vocab_size, config.hidden_size)
        self._embedding = weights.tensor("embed_tokens.weight", table)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_Layer(index, weights))
            trim_heap()
        # The logits' multiplier goes into the last norm: the head is linear, and may be the embedding's own table.
        one = 1.0 if config.norm_offset else 0.0
        scale = config.logit_scale
        self._norm = weights.tensor("norm.weight", (config.hidden_size,), scale=scale, offset=one * scale)
        self._head = weights.linear("lm_head", table, lambda: (self._head_table(weights, table), None))
        weights.finish()
        trim_heap()
        self.weight_bytes = weights.bytes
        """Bytes of all parameters; a tied table counts once, or twice where the output layer is a quantised copy."""
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._rope_rows = 0
        self.reserve_positions(min(self.max_model_len, _FIRST_ROPE_ROWS))

    def _head_table(self, weights: DecoderWeights, shape: tuple[int, int]) -> torch.Tensor:
        return self._embedding if self.config.tie_word_embeddings else weights.tensor("lm_head.weight", shape)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes in all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def allocate_kv_cache(self, num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of ``num_blocks`` blocks for every layer, zeroed, each [num_blocks, 16, Hkv, D] of ``dtype``."""
        shape = (num_blocks, BLOCK_SIZE, self.config.num_kv_heads, self.config.head_dim)

        def zeros() -> torch.Tensor:
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=self.dtype, device=self.device)
            # numpy asks the system for zeroed pages, which take memory only once they are written; torch would write
            # them all, and a pool is sized for the worst hour.
            size = math.prod(shape) * self.dtype.itemsize
            return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(self.dtype).view(shape)

        return [(zeros(), zeros()) for _ in self._layers]

    def reserve_positions(self, length: int) -> None:
        """Have RoPE tables for positions below ``length``. ``forward`` does so by itself; a caller that records CUDA
        graphs does it first, for growing replaces the tables."""
        if length <= self._rope_rows:
            return
        rows = max(length, min(2 * self._rope_rows, self.max_model_len))
        tables: dict[RopeConfig, torch.Tensor] = {}
        for layer, rope in zip(self._layers, self.config.ropes, strict=True):
            if rope is None:
                continue
            if rope not in tables:
                tables[rope] = cos_sin_table(rope, rows, self.max_model_len).to(self.device)
            layer.rope = tables[rope]
        self._rope_rows = rows

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout,
        kv_cache: KVCache,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the K and V of all T tokens into the cache and compute the logits of some of them.

        Args:
            token_ids, positions: int64 [T].
            layout: how the tokens lie in the batch and the cache.
            kv_cache: per layer K and V, each [num_blocks, 16, Hkv, D]; written at ``layout.slots``.
            logit_rows: int64 [R], rows of [0, T) whose logits are wanted; R may be 0.

        Returns:
            float32 [R, V].
        """
        if max(layout.context_lens_host) > self._rope_rows:
            self.reserve_positions(max(layout.context_lens_host))
        x = F.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            x *= self._embedding_scale
        residual: torch.Tensor | None = None
        last = len(self._layers) - 1
        # Past the last layer's attention only the wanted rows are needed; that saves its MLP for prompt tokens.
        wanted = logit_rows if logit_rows.shape[0] < token_ids.shape[0] else None
        for index, layer in enumerate(self._layers):
            k_cache, v_cache = kv_cache[index]
            x, residual = layer(x, residual, positions, layout, k_cache, v_cache, wanted if index == last else None)
        assert residual is not None
        x, _ = ck.add_rms_norm(x, residual, self._norm, self.config.rms_norm_eps)
        if wanted is None:
            x = x.index_select(0, logit_rows)
        logits = self._head(x).float()
        if self.config.final_softcap is not None:
            logits = logits.div_(self.config.final_softcap).tanh_().mul_(self.config.final_softcap)
        return logits
