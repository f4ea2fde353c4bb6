"""Write the demo model as transformers saves it, in float32 and bfloat16: python export.py FILE.gguf FOLDER.

In Carousel's own environment. FOLDER/fp32 and FOLDER/bf16 are there afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers


def main() -> None:
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # What is read from a GGUF file remembers that it was quantised and is not saved as plain weights: a fresh one is.
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = type(read)(type(read.config)(**settings))
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model.to(dtype).config.dtype = dtype
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    main()
