"""A model of random numbers, in transformers and in the engine, and an engine that serves it without a tokenizer."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .plan import FULL, TINY, Plan

if TYPE_CHECKING:
    from carousel.engine.engine import Engine
    from carousel.models.decoder import Decoder
    from carousel.models.loader import LoadedModel

__all__ = ["Session"]


class Numbers:
    """A tokenizer whose tokens are their numbers: the loads are token ids, and nobody reads the texts."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {i}" for i in ids)


@dataclass
class Loaded:
    """What the engine reads of a ``LoadedModel``."""

    decoder: Decoder
    max_model_len: int
    tokenizer: Numbers = field(default_factory=Numbers)
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    ranks: None = None


class Session:
    """The device, the sizes, and the models of one process, made when first needed; stages of kernels need none."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.plan: Plan = TINY if tiny else FULL
        self.device = torch.device("cpu" if tiny or not torch.cuda.is_available() else "cuda")
        self.dtype: torch.dtype = getattr(torch, self.plan.dtype)

    @functools.cached_property
    def transformers_model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        known = {k: v for k, v in self.plan.config.items() if k not in ("architectures", "model_type")}
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                return LlamaForCausalLM(LlamaConfig(**known, attn_implementation="sdpa")).eval()
        finally:
            torch.set_default_dtype(before)

    @functools.cached_property
    def decoder(self) -> Decoder:
        """With the weights of ``transformers_model``."""
        from carousel.models.decoder import Decoder
        from carousel.models.families import decoder_config
        from carousel.models.weights import DictSource

        state = {name: tensor.detach() for name, tensor in self.transformers_model.state_dict().items()}
        config = decoder_config(self.plan.config)
        return Decoder(config, DictSource(state), self.device, self.dtype, max_model_len=self.plan.max_model_len)

    def drop_transformers(self) -> None:
        """Make room: the decoder has its own copy of what it fuses, and shares the rest."""
        if "transformers_model" in self.__dict__:
            _ = self.decoder
            del self.__dict__["transformers_model"]
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def engine(self, seats: int, *, batching: str = "continuous", max_batch_tokens: int = 0) -> Engine:
        """Started; prompts share nothing, and no load is refused."""
        from carousel.config import Settings
        from carousel.engine.engine import Engine

        gc.collect()  # an engine that went before holds most of the memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        settings = Settings(
            model="random",
            model_name="random",
            prefix_caching=False,
            max_batch_sequences=seats,
            max_batch_tokens=max_batch_tokens or (2048 if not self.tiny else 16),
            max_model_len=self.plan.max_model_len,
            kv_cache_memory="8MiB" if self.tiny else "0.8",
            batching=batching,
            target_step_ms=1000.0,
            max_queue_requests=100_000,
            max_queue_tokens=2**40,
            threads=1,
        )
        engine = Engine(self._loaded(), settings)
        engine.start()
        return engine

    def _loaded(self) -> LoadedModel:
        loaded: Any = Loaded(self.decoder, self.plan.max_model_len)
        return loaded

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random token ids."""
        generator = torch.Generator().manual_seed(seed)
        vocabulary = int(str(self.plan.config["vocab_size"]))
        return torch.randint(0, vocabulary, (length,), generator=generator).tolist()
