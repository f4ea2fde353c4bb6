"""The rotation of the residual stream: orthogonal, and invisible in what a model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from tests.models.harness import SIZES, logits_in_chunks, random_ids, random_model, save
from tests.models.test_tokenizer import byte_level_backend

from carousel.models import quantization
from carousel.models.decoder import Decoder
from carousel.models.loader import load_model
from carousel.models.quantization import QuantizingWeights
from carousel.models.rotation import rotate, rotate_back
from carousel.models.weights import open_safetensors

IDS = random_ids(24)


@pytest.mark.parametrize("width", [1, 2, 7, 36, 64, 576, 896])
def test_it_is_orthogonal_and_can_be_taken_back(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, width)
    torch.testing.assert_close(rotate_back(rotate(x)), x, rtol=0, atol=1e-5)
    matrix = rotate(torch.eye(width))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width), rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(x), x @ matrix, rtol=0, atol=1e-5)


def test_outliers_are_spread() -> None:
    """One channel, and all channels alike, which a Hadamard matrix alone would gather in one."""
    for row in (torch.zeros(1, 576).index_fill_(1, torch.tensor([7]), 100.0), torch.ones(1, 576)):
        turned = rotate(row)
        assert float(turned.abs().max()) < 6 * float(turned.square().mean().sqrt())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [tf.LlamaConfig, tf.Qwen2Config, tf.GraniteConfig, tf.Gemma2Config])
def test_a_rotated_model_computes_the_same(
    kind: type, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layers that are not quantised: then a rotation costs nothing but rounding. Gemma's is left as it is."""
    extra = {"residual_multiplier": 0.5, "logits_scaling": 4.0} if kind is tf.GraniteConfig else {}
    config = kind(**SIZES, tie_word_embeddings=tied, **extra)
    save(random_model(config), tmp_path)
    tf.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend()).save_pretrained(tmp_path)
    plain = load_model(tmp_path, dtype="float32").decoder

    class Exact:
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            self.weight, self.bias, self.nbytes = weight.float(), bias, weight.nbytes

        def tensors(self) -> dict[str, torch.Tensor]:
            return {"codes": self.weight}

    exact = quantization._Scheme(
        "kept", 1, ("codes",), True,
        lambda _, weight, bias: Exact(weight, bias), lambda *_: pytest.fail("not prepared"),
        lambda layer, name, config: lambda x: torch.nn.functional.linear(x, layer.weight, layer.bias),
    )  # fmt: skip
    monkeypatch.setitem(quantization._SCHEMES, "exact", exact)
    weights = QuantizingWeights(open_safetensors(tmp_path), plain.config, torch.float32, "exact")
    rotated = Decoder(plain.config, weights)
    expected, got = (logits_in_chunks(decoder, IDS, [7]) for decoder in (plain, rotated))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    turned = not torch.allclose(rotated._embedding, plain._embedding, atol=1e-3)
    assert turned == (kind is not tf.Gemma2Config)
