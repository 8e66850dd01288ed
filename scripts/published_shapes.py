"""Write engine/memory/published.json: the shapes of published models, by hub id, each checked by its parameter count.

    PYTHONPATH=… python scripts/published_shapes.py          # with the package litgpt, whose config.py lists models
    python scripts/published_shapes.py --configs DIR         # also DIR/owner/name/config.json, which win over it

A model is written only if the count that follows from its shape is within 2 % of the one that its card states
(CARDS): a wrong number of layers, width or a head that is tied or not would show. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dualtune.engine.memory.shapes import FAMILIES, UnknownShape, decoder_of

OUT = Path(__file__).parents[1] / "dualtune" / "engine" / "memory" / "published.json"
SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
CARDS = (  # a pattern of hub ids -> billions of parameters, as the model card or its safetensors index says
    (r"Qwen/Qwen2\.5-(Coder-)?0\.5B.*", 0.494), (r"Qwen/Qwen2\.5-(Coder-|Math-)?1\.5B.*", 1.544),
    (r"Qwen/Qwen2\.5-(Coder-)?3B.*", 3.086), (r"Qwen/Qwen2\.5-(Coder-|Math-)?7B(?!.*1M).*", 7.616),
    (r"Qwen/Qwen2\.5-(Coder-)?14B(?!.*1M).*", 14.77), (r"Qwen/(Qwen2\.5-(Coder-)?|QwQ-)32B.*", 32.76),
    (r"Qwen/Qwen2\.5-(Math-)?72B.*", 72.71), (r"Qwen/Qwen3-0\.6B.*", 0.596), (r"Qwen/Qwen3-1\.7B.*", 1.72),
    (r"Qwen/Qwen3-4B.*", 4.02), (r"Qwen/Qwen3-8B.*", 8.19), (r"Qwen/Qwen3-14B.*", 14.77), (r"Qwen/Qwen3-32B", 32.76),
    (r"deepseek-ai/DeepSeek-R1-Distill-Qwen-1\.5B", 1.777), (r"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7.616),
    (r"deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 14.77), (r"deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32.76),
    (r"meta-llama/Llama-2-7b-.*", 6.738), (r"meta-llama/Llama-2-13b-.*", 13.02),
    (r"meta-llama/Llama-2-70b-.*", 68.98), (r"meta-llama/(Meta-)?Llama-3(\.1)?-8B.*", 8.03),
    (r"meta-llama/(Meta-)?Llama-3(\.[13])?-70B.*", 70.55), (r"meta-llama/(Meta-)?Llama-3\.1-405B.*", 405.85),
    (r"meta-llama/Llama-3\.2-1B.*", 1.236), (r"meta-llama/Llama-3\.2-3B.*", 3.213),
    (r"deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8.03), (r"deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70.55),
    (r"nvidia/Llama-3\.1-Nemotron-70B.*", 70.55), (r"codellama/CodeLlama-7b-.*", 6.738),
    (r"codellama/CodeLlama-13b-.*", 13.02), (r"codellama/CodeLlama-34b-.*", 33.74),
    (r"codellama/CodeLlama-70b-.*", 68.98), (r"mistralai/(Mistral|mathstral)-7B-.*", 7.245),
    (r"mistralai/Mistral-Large-Instruct-24\d\d", 122.61), (r"mistralai/Mistral-Nemo-.*-2407", 12.25),
    (r"mistralai/Mistral-Small-24B-.*-2501", 23.57), (r"HuggingFaceTB/SmolLM2-135M.*", 0.1345),
    (r"HuggingFaceTB/SmolLM2-360M.*", 0.3618), (r"HuggingFaceTB/SmolLM2-1\.7B.*", 1.711),
    (r"TinyLlama/TinyLlama-1\.1B-.*", 1.1), (r"tiiuae/Falcon3-1B-.*", 1.669), (r"tiiuae/Falcon3-3B-.*", 3.228),
    (r"tiiuae/Falcon3-7B-.*", 7.456), (r"tiiuae/Falcon3-10B-.*", 10.31), (r"BSC-LT/salamandra-2b.*", 2.253),
    (r"BSC-LT/salamandra-7b.*", 7.768), (r"lmsys/vicuna-7b-v1\.5", 6.738), (r"lmsys/vicuna-13b-v1\.5", 13.02),
    (r"HuggingFaceH4/zephyr-7b-beta", 7.242), (r"NousResearch/Hermes-3-Llama-3\.1-8B", 8.03),
    (r"teknium/OpenHermes-2\.5-Mistral-7B", 7.242),
)  # fmt: skip
TIED = re.compile(r"SmolLM2|Qwen2\.5-(Coder-|Math-)?(0\.5|1\.5|3)B|Qwen3-(0\.6|1\.7|4)B|Llama-3\.2-[13]B")
# Models that were trained from another, whose shape they keep.
SAME_AS = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "Qwen/Qwen2.5-Math-7B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": "Qwen/Qwen2.5-14B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "Qwen/Qwen2.5-32B",
    "lmsys/vicuna-7b-v1.5": "meta-llama/Llama-2-7b-hf",
    "lmsys/vicuna-13b-v1.5": "meta-llama/Llama-2-13b-hf",
    "HuggingFaceH4/zephyr-7b-beta": "mistralai/Mistral-7B-v0.1",
    "teknium/OpenHermes-2.5-Mistral-7B": "mistralai/Mistral-7B-v0.1",
    "NousResearch/Hermes-3-Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
}

_NEMO = ("mistral", 5120, 14336, 40, 32, 8, 128, 131072, False)
_SMALL = ("mistral", 5120, 32768, 40, 32, 8, 128, 131072, False)
IN_WORDS = {  # shapes that a card or a report gives in words
    "mistralai/Mistral-Nemo-Base-2407": _NEMO,
    "mistralai/Mistral-Nemo-Instruct-2407": _NEMO,
    "mistralai/Mistral-Small-24B-Base-2501": _SMALL,
    "mistralai/Mistral-Small-24B-Instruct-2501": _SMALL,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, False),
}


def from_litgpt() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the dense models of litgpt's table: hub id, keys of config.json, and where they come from."""
    from litgpt.config import Config, configs  # type: ignore[import-not-found]

    for entry in configs:
        hub = entry.get("hf_config")
        if not hub or entry.get("mlp_class_name") != "LLaMAMLP" or entry.get("norm_class_name") != "RMSNorm":
            continue
        name, found = f"{hub['org']}/{hub['name']}", Config(**entry)
        if (family := _family(name)) is None:
            continue
        yield name, _shape(family, found, entry.get("padded_vocab_size"), bool(TIED.search(name))), "litgpt/config.py"


def _family(name: str) -> str | None:
    for part, family in (("Qwen3", "qwen3"), ("Qwen2.5", "qwen2"), ("QwQ", "qwen2"), ("istral-", "mistral"),
                         ("mathstral", "mistral")):  # fmt: skip
        if part in name:
            return family
    return "llama" if any(re.fullmatch(pattern, name) for pattern, _ in CARDS) else None


def _shape(family: str, found: Any, padded: int | None, tied: bool) -> dict[str, Any]:
    values = (family, found.n_embd, found.intermediate_size, found.n_layer, found.n_head, found.n_query_groups,
              found.head_size, padded or found.vocab_size, tied)  # fmt: skip
    return dict(zip(SHAPE, values, strict=True))


def from_configs(directory: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path in sorted(directory.glob("*/*/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("model_type") not in FAMILIES:
            continue
        decoder = decoder_of(config)
        values = (config["model_type"], decoder.hidden, decoder.inner, decoder.layers, decoder.heads, decoder.kv_heads,
                  decoder.head_dim, decoder.vocab, decoder.tied)  # fmt: skip
        yield f"{path.parts[-3]}/{path.parts[-2]}", dict(zip(SHAPE, values, strict=True)), "config.json"


def checked(name: str, config: Mapping[str, Any]) -> float | str:
    """Return the parameters by the card, in billions, or why the model is left out."""
    billions = next((each for pattern, each in CARDS if re.fullmatch(pattern, name)), None)
    if billions is None:
        return "no count of its card"
    try:
        count = decoder_of(config).num_parameters / 1e9
    except UnknownShape as error:
        return str(error)
    return billions if abs(count / billions - 1) <= 0.02 else f"{count:.3f}B by its shape, {billions}B by its card"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path)
    options = parser.parse_args()
    models = {name: (config, origin) for name, config, origin in from_litgpt()}
    models |= {name: (dict(zip(SHAPE, shape, strict=True)), "the card") for name, shape in IN_WORDS.items()}
    models |= {name: (config, origin) for name, config, origin in from_configs(options.configs or Path("/nowhere"))}
    for name in [each for each in models if each.startswith("meta-llama/Meta-")]:  # renamed on the hub; both names work
        models.setdefault(name.replace("Meta-", "", 1), models[name])
    models |= {name: (models[base][0], f"{base}, whose shape it keeps") for name, base in SAME_AS.items()}
    rows = []
    for name in sorted(models, key=str.lower):
        config, origin = models[name]
        billions = checked(name, config)
        if isinstance(billions, str):
            print(f"left out  {name}: {billions}")
        else:
            rows.append(json.dumps([name, *config.values(), billions, origin]))
    head = json.dumps(["name", *SHAPE, "billions_by_card", "from"])
    OUT.write_text(f'{{"columns": {head},\n"models": [\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8")
    print(f"{len(rows)} models in {OUT}")


if __name__ == "__main__":
    main()
