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
from .parallel import ALONE, Part, Ranks
from .rope import RopeConfig, cos_sin_table
from .weights import DecoderWeights, Linear, LinearLayer, Piece, TensorSource, Weights, trim_heap

KVCache = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer K and V, each [num_blocks, 16, Hkv, D], of the KV heads that this rank holds."""

_FIRST_ROPE_ROWS = 4096

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ck.silu_mul,
    "gelu_tanh": ck.gelu_tanh_mul,
}


class _Layer:
    """Attention and MLP of one layer, or a rank's part. ``rope`` is its table, or None for a layer without positions.

    Queries, keys, values and the MLP's inner features are the rank's own; what goes into and comes out of a branch is
    whole in every rank.
    """

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
        config, split = weights.config, weights.split
        name = f"layers.{index}."
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        all_heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        ranges = (split.heads, split.kv_heads, split.kv_heads)
        heads, kv_heads = (end - begin for begin, end in ranges[:2])
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
        qkv = [
            Piece(f"{name}self_attn.{p}_proj", n * size, Part(0, begin * size, end * size))
            for p, n, (begin, end) in zip("qkv", all_heads, ranges, strict=True)
        ]
        self.qkv = _fused_linear(weights, f"{name}self_attn.qkv_proj", qkv, hidden, config.qkv_bias)
        columns = Part(1, split.heads[0] * size, split.heads[1] * size)
        self.output = _linear(
            weights, f"{name}self_attn.o_proj", (hidden, config.num_heads * size), columns, config.output_bias
        )
        self.q_norm = norm("self_attn.q_norm", size) if config.qk_norm else None
        self.k_norm = norm("self_attn.k_norm", size) if config.qk_norm else None
        self.post_attention_norm = norm("post_attention_layernorm") if config.post_norms else None
        self.mlp_norm = norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm")
        gate_up = [Piece(f"{name}mlp.{p}_proj", inner, Part(0, *split.inner)) for p in ("gate", "up")]
        self.gate_up = _fused_linear(weights, f"{name}mlp.gate_up_proj", gate_up, hidden, config.mlp_bias)
        self.down = _linear(weights, f"{name}mlp.down_proj", (hidden, inner), Part(1, *split.inner), config.mlp_bias)
        self.post_mlp_norm = norm("post_feedforward_layernorm") if config.post_norms else None

    def parts(self, config: DecoderConfig) -> ck.LayerParts:
        return ck.LayerParts(
            attention_norm=self.attention_norm, mlp_norm=self.mlp_norm, q_norm=self.q_norm, k_norm=self.k_norm,
            post_attention_norm=self.post_attention_norm, post_mlp_norm=self.post_mlp_norm, qkv=self.qkv,
            output=self.output, gate_up=self.gate_up, down=self.down, heads=self.sections[0],
            kv_heads=self.sections[1], head_dim=self.head_dim, scale=self.scale, softcap=self.softcap,
            window=self.window, eps=self.eps, activation=config.activation,
        )  # fmt: skip

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
        q, residual = self.before_attention(x, residual, positions, layout.slots, k_cache, v_cache)
        x = self.attention(q, layout, k_cache, v_cache)
        if rows is not None:
            x = x.index_select(0, rows)
            residual = residual.index_select(0, rows)
        return self.after_attention(x, residual)

    def before_attention(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch output, residual) of the last layer -> queries [T, Hq, D], residual; keys and values are written."""
        if residual is None:
            residual = x
            x = ck.rms_norm(x, self.attention_norm, self.eps)
        else:
            x, residual = ck.add_rms_norm(x, residual, self.attention_norm, self.eps)
        q, k, v = self.qkv(x).view(-1, self.total_heads, self.head_dim).split(self.sections, dim=1)
        if self.rope is not None:
            ck.rope_write_kv(
                q, k, v, self.rope, positions, k_cache, v_cache, slots,
                q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps,
            )  # fmt: skip
            return q, residual
        if self.q_norm is not None and self.k_norm is not None:
            q = ck.rms_norm(q, self.q_norm, self.eps)
            k = ck.rms_norm(k, self.k_norm, self.eps)
        ck.write_kv(k, v, k_cache, v_cache, slots)
        return q, residual

    def attention(
        self,
        q: torch.Tensor,
        layout: BatchLayout,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queries [T, Hq, D] -> [T, Hq * D], in ``out`` [T, Hq, D] if given."""
        return ck.paged_attention(
            q, k_cache, v_cache, layout, scale=self.scale, sliding_window=self.window, softcap=self.softcap, out=out
        ).view(-1, self.width)

    def after_attention(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention gave [T, Hq * D], residual -> (branch output, residual) of this layer."""
        x = self.output(x)
        if self.post_attention_norm is not None:
            x = ck.rms_norm(x, self.post_attention_norm, self.eps)
        x, residual = ck.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        x = self.down(self.activation(self.gate_up(x)))
        if self.post_mlp_norm is not None:
            x = ck.rms_norm(x, self.post_mlp_norm, self.eps)
        return x, residual


def _linear(weights: DecoderWeights, name: str, shape: tuple[int, int], part: Part, bias: bool) -> Linear:
    """A projection back into the residual stream, with the branch's multiplier folded in, summed over the ranks."""
    scale, ranks = weights.config.residual_scale, weights.ranks

    def read() -> torch.Tensor:
        return weights.tensor(f"{name}.weight", shape, scale=scale, part=part)

    def read_bias() -> torch.Tensor | None:
        found = weights.tensor(f"{name}.bias", shape[:1], scale=scale) if bias else None
        return found if ranks.rank == 0 else None  # the sum has it once

    pieces = [Piece(name, shape[0], part)]
    layer = weights.linear(LinearLayer(name, (shape[0], part.length), read, read_bias, pieces, scale))
    return layer if ranks.size == 1 else lambda x: ranks.sum(layer(x))


def _fused_linear(weights: DecoderWeights, whole: str, pieces: list[Piece], columns: int, bias: bool) -> Linear:
    shape = sum(piece.part.length for piece in pieces), columns

    def read() -> torch.Tensor:
        return weights.fused(whole, pieces, columns, ".weight")

    def read_bias() -> torch.Tensor | None:
        return weights.fused(whole, pieces, None, ".bias") if bias else None

    return weights.linear(LinearLayer(whole, shape, read, read_bias, pieces))


class Decoder:
    """A loaded model: token ids in, logits out.

    Args:
        config: the family's settings.
        source: the checkpoint's tensors; each is read once, straight into its place. Or where else its weights come
            from, whose device and dtype hold then.
        device, dtype: where and in what the weights and activations are. Logits are float32 always.
        kv_dtype: of the KV cache; None for ``dtype``.
        max_model_len: the longest context that will be served, in tokens; None: ``config.default_model_len``. It
            fixes the frequencies of length-dependent RoPE (see ``rope``).
        ranks: among whom it is split; all of them call its methods in the same order, with the same arguments.

    Raises:
        ModelLoadError: a tensor is missing, unexpected or has another shape; or it cannot be split among so many ranks.
    """

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource | DecoderWeights,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        kv_dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        weights = (
            source
            if isinstance(source, DecoderWeights)
            else Weights(source, config, torch.device(device), dtype, ranks)
        )
        self.config = config
        self.ranks = weights.ranks
        self._split = weights.split
        self.device = weights.device
        self.dtype = weights.dtype
        self.kv_dtype = kv_dtype or weights.dtype
        """Of cached keys and values; may be changed before any are allocated: to float32 or bfloat16 on a CPU, to
        float8_e4m3fn, whose scale is 1, on a GPU."""
        self.max_model_len = max_model_len or config.default_model_len
        table = (config.vocab_size, config.hidden_size)
        tokens = Part(0, *weights.split.vocab)
        self._embedding = weights.tensor("embed_tokens.weight", table, part=tokens)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_Layer(index, weights))
            trim_heap()
        self._fused = ck.fuse_layers([layer.parts(config) for layer in self._layers])
        # The logits' multiplier goes into the last norm: the head is linear, and may be the embedding's own table.
        one = 1.0 if config.norm_offset else 0.0
        scale = config.logit_scale
        self._norm = weights.tensor("norm.weight", (config.hidden_size,), scale=scale, offset=one * scale)
        shape = (tokens.length, config.hidden_size)
        tied = "embed_tokens" if config.tie_word_embeddings else "lm_head"
        pieces = [Piece(tied, config.vocab_size, tokens)]
        head = LinearLayer("lm_head", shape, lambda: self._head_table(weights, table, tokens), lambda: None, pieces)
        self._head = weights.linear(head)
        weights.finish()
        trim_heap()
        self.weight_bytes = weights.bytes
        """Bytes of all parameters here; a tied table counts once, or twice where the output layer is a quantised
        copy."""
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._rope_rows = 0
        self._tables: list[torch.Tensor | None] = []
        self.reserve_positions(min(self.max_model_len, _FIRST_ROPE_ROWS))

    def _head_table(self, weights: DecoderWeights, shape: tuple[int, int], part: Part) -> torch.Tensor:
        return (
            self._embedding if self.config.tie_word_embeddings else weights.tensor("lm_head.weight", shape, part=part)
        )

    @property
    def _kv_heads(self) -> int:
        return self._split.kv_heads[1] - self._split.kv_heads[0]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes in all layers, in this rank."""
        config = self.config
        return 2 * config.num_layers * self._kv_heads * config.head_dim * self.kv_dtype.itemsize

    def allocate_kv_cache(self, num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of ``num_blocks`` blocks for every layer, zeroed, each [num_blocks, 16, Hkv, D] of ``kv_dtype``."""
        shape = (num_blocks, BLOCK_SIZE, self._kv_heads, self.config.head_dim)

        def zeros() -> torch.Tensor:
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=self.kv_dtype, device=self.device)
            # numpy asks the system for zeroed pages, which take memory only once they are written; torch would write
            # them all, and a pool is sized for the worst hour.
            size = math.prod(shape) * self.kv_dtype.itemsize
            return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(self.kv_dtype).view(shape)

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
        self._tables = [layer.rope for layer in self._layers]  # a new list, by which fused layers know of the change
        self._rope_rows = rows

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            x = F.embedding(token_ids, self._embedding)
        else:
            begin, end = self._split.vocab
            elsewhere = (token_ids < begin) | (token_ids >= end)
            rows = F.embedding((token_ids - begin).masked_fill_(elsewhere, 0), self._embedding)
            x = self.ranks.sum(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))
        if self._embedding_scale != 1.0:
            x *= self._embedding_scale
        return x

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
        x = self._embedded(token_ids)
        # Past the last layer's attention only the wanted rows are needed; that saves its MLP for prompt tokens.
        wanted = logit_rows if logit_rows.shape[0] < token_ids.shape[0] else None
        x, residual = self._through_layers(x, positions, layout, kv_cache, wanted)
        return self._logits(x, residual, logit_rows if wanted is None else None)

    def _logits(self, x: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """(branch output, residual) of the last layer -> float32 [R, V], of ``rows``, if given."""
        x, _ = ck.add_rms_norm(x, residual, self._norm, self.config.rms_norm_eps)
        if rows is not None:
            x = x.index_select(0, rows)
        logits = self._head(x)
        if self.ranks.size > 1:
            logits = F.pad(logits, (0, self._split.vocab_width - logits.shape[1]))
            logits = self.ranks.join_columns(logits)[:, : self.config.vocab_size]
        logits = logits.float()
        if self.config.final_softcap is not None:
            logits = logits.div_(self.config.final_softcap).tanh_().mul_(self.config.final_softcap)
        return logits

    # ---- the same in pieces, for a caller that records what lies between attentions

    @property
    def num_layers(self) -> int:
        """How many attentions there are."""
        return len(self._layers)

    def before_attention(
        self,
        index: int,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv_cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the attention before number ``index`` to its queries. Every row is computed by itself.

        Args:
            index: of the layer.
            x: what :meth:`attention` gave for the layer before, [T, Hq, D]; for the first layer token ids, int64 [T].
            residual: [T, H]; its memory may be used for the result. None for the first layer.
            positions, slots: int64 [T]; K and V are written into the layer's cache.
            kv_cache: as for :meth:`forward`.

        Returns:
            Queries [T, Hq, D] and residual [T, H]. RoPE reaches as far as :meth:`reserve_positions` was told.
        """
        if residual is None:
            x = self._embedded(x)
        else:
            before = self._layers[index - 1]
            x, residual = before.after_attention(x.view(-1, before.width), residual)
        return self._layers[index].before_attention(x, residual, positions, slots, *kv_cache[index])

    def attention(
        self, index: int, queries: torch.Tensor, layout: BatchLayout, kv_cache: KVCache, out: torch.Tensor
    ) -> None:
        """Attention of layer ``index``: queries [T, Hq, D] -> ``out`` [T, Hq, D], contiguous."""
        self._layers[index].attention(queries, layout, *kv_cache[index], out)

    def after_attention(self, x: torch.Tensor, residual: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """From the last attention [T, Hq, D] to the logits float32 [R, V] of int64 [R] rows."""
        last = self._layers[-1]
        x = x.view(-1, last.width).index_select(0, logit_rows)
        return self._logits(*last.after_attention(x, residual.index_select(0, logit_rows)))

    def _through_layers(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout,
        kv_cache: KVCache,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding -> (branch output, residual) of the last layer; only the ``wanted`` rows, if given."""
        if self._fused is not None and ck.layers_are_fused():
            done = self._fused(x, positions, layout, kv_cache, self._tables, wanted)
            if done is not None:
                return done
        residual: torch.Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            k_cache, v_cache = kv_cache[index]
            x, residual = layer(x, residual, positions, layout, k_cache, v_cache, wanted if index == last else None)
        assert residual is not None
        return x, residual
