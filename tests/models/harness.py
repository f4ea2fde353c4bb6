"""Tiny random models, and a paged KV cache with scattered blocks to run them through."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from carousel.models.decoder import Decoder
from carousel.models.families import decoder_config
from carousel.models.weights import open_safetensors
from carousel_kernels.layout import BLOCK_SIZE, BatchLayout

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(config: transformers.PretrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A transformers model in float32 whose parameters, norms and biases included, are all random."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=0.2)
    return model


def save(model: transformers.PreTrainedModel, directory: Path, **changes: Any) -> Path:
    """Write config.json and model.safetensors; ``changes`` overwrite entries of the config (None removes)."""
    model.save_pretrained(directory)
    if changes:
        file = directory / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def load(directory: Path, **options: Any) -> Decoder:
    config = decoder_config(json.loads((directory / "config.json").read_text()))
    return Decoder(config, open_safetensors(directory), **options)


def expected_logits(model: transformers.PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), V] from transformers in one pass."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


class PagedRun:
    """Sequences on one decoder; each gets blocks from all over the cache, which is filled with junk."""

    def __init__(self, decoder: Decoder, sequences: int = 1, blocks: int = 16) -> None:
        self.decoder = decoder
        self.cache = decoder.allocate_kv_cache(sequences * blocks + 1)
        for pair in self.cache:
            for tensor in pair:
                tensor.fill_(7.0)
        order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(3)) + 1
        self.tables = order.view(sequences, blocks)
        self.done = [0] * sequences

    def step(self, new: dict[int, Sequence[int]], rows: Iterable[int] | None = None) -> torch.Tensor:
        """Feed each sequence's new ids (decodes are put first); logits of ``rows``, or of all in the order fed."""
        order = sorted(new, key=lambda s: len(new[s]) != 1)
        ids, positions, slots, lens, contexts = [], [], [], [], []
        for s in order:
            at = torch.arange(self.done[s], self.done[s] + len(new[s]))
            self.done[s] += len(new[s])
            ids += list(new[s])
            positions.append(at)
            slots.append(self.tables[s][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            lens.append(len(new[s]))
            contexts.append(self.done[s])
        layout = BatchLayout(
            query_start=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=self.tables[order].int(),
            slots=torch.cat(slots),
            query_lens_host=lens,
            context_lens_host=contexts,
            num_decodes=sum(n == 1 for n in lens),
        )
        wanted = torch.arange(len(ids)) if rows is None else torch.tensor(list(rows), dtype=torch.int64)
        with torch.inference_mode():
            return self.decoder.forward(torch.tensor(ids), torch.cat(positions), layout, self.cache, wanted)


def logits_in_chunks(decoder: Decoder, ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """[len(ids), V], computed in steps of the given sizes; the last size repeats."""
    run, parts, at, step = PagedRun(decoder), [], 0, 0
    while at < len(ids):
        size = sizes[min(step, len(sizes) - 1)]
        parts.append(run.step({0: ids[at : at + size]}))
        at, step = at + size, step + 1
    return torch.cat(parts)


def random_ids(count: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids
