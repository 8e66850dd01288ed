"""Draw docs/pictures/speed.svg and memory.svg from benchmarks/results/peers.json and memory_guide.json.

    python scripts/draw_results.py

Speed: training against peers. Each bar is the median of the ratios of interleaved pairs, and its line goes from the
lowest to the highest. The picture shows the peers at the best settings that were found for them, and TRL's packed rows.
All parts, including those at a peer's defaults, are in benchmarks/results/peers.md.

Memory: the parts of a step of Mistral 7B, with one technique more in each row, as the planner computes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"

SETTINGS = {"best": "its best", "packed": "packed"}
PEERS = {"hf_peft": "Hugging Face + PEFT", "trl": "TRL", "llamafactory": "LLaMA-Factory", "axolotl": "axolotl",
         "unsloth": "Unsloth", "mlx_lm": "mlx-lm"}  # fmt: skip
GROUPS = {  # platform/shape/workload -> description
    "cpu/smollm2-135m/gsm8k": "PyTorch on a CPU, SmolLM2-135M shape, GSM8K",
    "cpu/llama-19m/gsm8k": "PyTorch on a CPU, 19M Llama shape, GSM8K",
    "mlx/llama-1m/gsm8k-masked": "MLX's CPU build, 1M Llama shape, GSM8K",
    "mlx/llama-1m/wikisql": "MLX's CPU build, 1M Llama shape, WikiSQL",
}
LEFT, SCALE, BAR, ROW, HEAD, WIDTH = 212, 84, 15, 25, 34, 680  # px; SCALE is the length of a ratio of 1
MEMORY_STYLE = ".p{fill:#8250df}.a{fill:#bf8700}.w{fill:#8c959f}"
MEMORY_SCALE, GIB = 17.5, 2**30  # px for a GiB
PARTS = {  # class of the bar -> its name, and the parts of the estimate that it shows
    "b": ("weights of the base", ("weights",)),
    "p": ("adapter and optimizer", ("adapter", "optimizer")),
    "a": ("activations", ("activations", "recomputation")),
    "w": ("workspace, CUDA context", ("workspace", "loss", "reserve")),
}
FITTED = 'textLength="648" lengthAdjust="spacingAndGlyphs"'  # into the picture, whatever the reader's font is
STYLE = """
.f{fill:#fff;stroke:#d0d7de}text{fill:#1f2328;font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
.b{fill:#0969da}.r{stroke:#1f2328}.o{stroke:#59636e}.h{font-weight:600}.s{fill:#59636e}
@media(prefers-color-scheme:dark){.f{fill:#0d1117;stroke:#30363d}text{fill:#e6edf3}.b{fill:#388bfd}.r{stroke:#e6edf3}
.o{stroke:#9198a1}.s{fill:#9198a1}}
""".strip()


class Bar(NamedTuple):
    name: str
    ratio: dict[str, float]  # lowest, median, highest


def bars(parts: dict[str, Any], group: str) -> list[Bar]:
    """Return the bars of a group, the largest ratio first."""
    found: list[Bar] = []
    for part, figures in parts.items():
        place, peer, settings = part.rsplit("/", 2)
        if place == group and peer in PEERS and settings in SETTINGS and "not_run" not in figures:
            found.append(Bar(f"{PEERS[peer]}, {SETTINGS[settings]}", figures["tokens_per_s"]["ratio"]))
    return sorted(found, key=lambda bar: -bar.ratio["median"])


def draw(results: dict[str, Any]) -> str:
    groups = {title: bars(results["parts"], group) for group, title in GROUPS.items()}
    drawn = [_text(16, 28, "Training speed as a multiple of the peer's (1× = as fast as the peer)", "h")]
    top = 44
    for title, found in groups.items():
        drawn.append(_text(16, top + 20, title, "s"))
        top += HEAD - 4
        equal = f'<path class="o" d="M{LEFT + SCALE} {top - 3}v{ROW * len(found) - 4}" stroke-dasharray="3 3"/>'
        for bar in found:
            drawn += _bar(bar, top)
            top += ROW
        drawn.append(equal)
        top += 4
    note = "Medians of interleaved pairs at equal losses, lines from lowest to highest. "
    note += "2 CPU cores with AMX; not run on a GPU."
    drawn.append(_text(16, top + 18, note, "s", FITTED))
    return _svg(drawn, top + 34, "Training speed against peers")


def draw_memory(results: dict[str, Any]) -> str:
    """Return a row of stacked bars for each technique."""
    drawn = [_text(16, 28, "Memory of a training step of Mistral 7B, one technique more in each row", "h")]
    top, x = 44, 16.0
    for kind, (name, _) in PARTS.items():
        drawn += [f'<rect class="{kind}" x="{x:g}" y="{top}" width="{BAR}" height="{BAR}" rx="2"/>',
                  _text(x + BAR + 6, top + 12, name, "s")]  # fmt: skip
        x += 40 + 6.7 * len(name)
    top += ROW + 6
    for row in results["techniques"]:
        parts, x = dict(row["parts"]), float(LEFT)
        drawn.append(_text(LEFT - 10, top + BAR / 2 + 4.5, row["technique"], "", 'text-anchor="end"'))
        for kind, (_, names) in PARTS.items():
            width = MEMORY_SCALE * sum(parts.pop(name, 0) for name in names) / GIB
            drawn.append(f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}"/>')
            x += width
        if parts:
            raise ValueError(f"PARTS has no bar for {', '.join(parts)}")
        drawn.append(_text(x + 8, top + BAR / 2 + 4.5, f"{sum(row['parts'].values()) / GIB:.1f} GiB", "h"))
        top += ROW
    note = "LoRA of rank 16, one document of 2,048 tokens. By the memory planner, not measured on a GPU."
    drawn.append(_text(16, top + 16, note, "s", FITTED))
    return _svg(drawn, top + 32, "Memory of a training step of Mistral 7B, by part and technique", STYLE + MEMORY_STYLE)


def _svg(drawn: list[str], height: float, label: str, style: str = STYLE) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">',
        f"<style>{style}</style>",
        f'<rect class="f" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *drawn,
        "</svg>\n",
    ])  # fmt: skip


def _bar(bar: Bar, top: int) -> list[str]:
    low, median, high = (LEFT + SCALE * bar.ratio[key] for key in ("lowest", "median", "highest"))
    middle = top + BAR / 2
    return [
        _text(LEFT - 10, middle + 4.5, bar.name, "", 'text-anchor="end"'),
        f'<rect class="b" x="{LEFT}" y="{top}" width="{median - LEFT:.1f}" height="{BAR}" rx="2"/>',
        f'<path class="r" d="M{low:.1f} {middle}H{high:.1f}"/>',
        _text(max(high, median) + 8, middle + 4.5, f"{bar.ratio['median']:.1f}×", "h"),
    ]


def _text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" {more}>{escape(words)}</text>'


def main() -> None:
    for picture, text in pictures().items():
        picture.write_text(text, encoding="utf-8")
        print(picture.relative_to(ROOT))


def pictures() -> dict[Path, str]:
    """Return each picture with what is drawn in it."""
    return {
        PICTURES / "speed.svg": draw(result("peers")),
        PICTURES / "memory.svg": draw_memory(result("memory_guide")),
    }


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
