"""What `dualtune data clean` finds and costs: beside rensa, by rows per second, by memory per row.

    python benchmarks/clean.py --shared ../shared [--peer-python PATH] [--rows 20000] [--parts found,speed,template]

found     4000 rows of GSM8K and a copy of each with 0 to 19 % of its words replaced: how many of the copies whose
          similarity is 0.8 or more are left out, and how many others. The truth is an exact comparison of each copy
          with its original. Beside it rensa, if --peer-python has it: its deduplicator at the same threshold, and its
          index with the bands of dualtune, of which the candidates are counted.
speed     rows per second of processor time of the command's work (reading, comparing, writing) on rows of GSM8K made
          distinct by a number, at 10 % of exact and 10 % of near duplicates; memory per row, between a quarter of the
          rows and all (Linux).
template  the worst case: rows of which half is the same text, so that nearly all are candidates of all.
alike     rows of one template of 80 words, 8 of which differ in each: all share about 80 % of their words. One in a
          hundred has a copy with one word changed. At 1,000 to 20,000 rows.

All times are processor time, because other programs may run here.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

from dualtune.config.data_section import SourceConfig
from dualtune.data.chat.examples import Example
from dualtune.data.cleaning import clean
from dualtune.data.documents import open_one
from dualtune.data.similarity import NEAR, Repeats, jaccard, shingles, text_of

GSM8K = "data/gsm8k/train.jsonl"
PEER = Path(__file__).with_name("clean_peer.py")
FOUND_ROWS, TEMPLATE_ROWS, ALIKE_ROWS = 4000, 5000, (1000, 4000, 20_000)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--parts", default="found,speed,template,alike")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return print(json.dumps(measure(args.measure)))
    with (args.shared / GSM8K).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    makers = {
        "found": lambda: found(rows[:FOUND_ROWS], args.peer_python),
        "speed": lambda: speed(rows, args.rows, args.shared),
        "template": lambda: template(rows[:TEMPLATE_ROWS]),
        "alike": lambda: [alike(number) for number in ALIKE_ROWS],
    }
    figures = {part: makers[part]() for part in args.parts.split(",")}
    if (of_templates := figures.pop("alike", None)) is not None:  # needs no other data, and is measured by itself
        print(record.write("clean_alike", {"made_by": "benchmarks/clean.py --parts alike", "runs": of_templates}))
    if figures:
        print(record.write("clean", figures))
    return None


def found(rows: list[dict[str, str]], peer: str | None) -> dict[str, Any]:
    rng = random.Random(0)
    examples: list[Example] = []
    truth: list[bool] = []
    for i, row in enumerate(rows):
        words = f"{row['question']} {row['answer']}".split(" ")
        changed = list(words)
        for at in rng.sample(range(len(words)), len(words) * (i % 20) // 100):
            changed[at] = "".join(rng.choices("abcdefghij", k=5))
        pair = [
            Example("f", 2 * i + k, prompt="", completion=" ".join(each)) for k, each in enumerate((words, changed))
        ]
        truth += [False, jaccard(*(shingles(text_of(each)) for each in pair)) >= NEAR]
        examples += pair
    began = time.process_time()
    with Repeats(NEAR) as repeats:
        for example in examples:
            repeats.add(example)
        flags = repeats.find()
    ours = judged([i in flags for i in range(len(examples))], truth) | {"cpu_seconds": time.process_time() - began}
    result: dict[str, Any] = {"rows": len(examples), "copies_near": sum(truth), "dualtune": ours}
    if peer:
        texts = "".join(f"{json.dumps(text_of(example))}\n" for example in examples)
        got = subprocess.run([peer, str(PEER), str(NEAR)], input=texts, capture_output=True, text=True, check=True)
        answer = json.loads(got.stdout)
        result["rensa"] = judged(answer["flags"], truth) | {"cpu_seconds": answer["cpu_seconds"]}
        candidates = judged(answer["candidate_flags"], truth) | {"cpu_seconds": answer["candidate_cpu_seconds"]}
        result["rensa_candidates"] = candidates
        version = "import importlib.metadata as m; print(m.version('rensa'))"
        result["rensa"]["version"] = subprocess.check_output([peer, "-c", version], text=True).strip()
    return result


def judged(flags: list[bool], truth: list[bool]) -> dict[str, Any]:
    right = sum(a and b for a, b in zip(flags, truth, strict=True))
    return {"left_out": sum(flags), "recall": right / sum(truth), "precision": right / max(1, sum(flags))}


def speed(rows: list[dict[str, str]], number: int, shared: Path) -> dict[str, Any]:
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for size in (number // 4, number):
            path = Path(directory) / f"{size}.jsonl"
            with path.open("w", encoding="utf-8") as file:
                for i in range(size):
                    row = made_distinct(rows, i - i % 10 if i % 10 == 9 else i)
                    if i % 10 == 8:
                        row = made_distinct(rows, i - 8)
                        row["answer"] += " Indeed."
                    file.write(json.dumps(row) + "\n")
            command = [sys.executable, __file__, "--shared", str(shared), "--measure", str(path)]
            results[size] = json.loads(subprocess.check_output(command, text=True))
    few, many = results.values()
    per_row = (many["peak_bytes"] - few["peak_bytes"]) / (many["rows"] - few["rows"])
    return {"runs": list(results.values()), "peak_bytes_per_row": per_row}


def made_distinct(rows: list[dict[str, str]], number: int) -> dict[str, str]:
    """A row in which every word of the question has the number of its round through the data."""
    row, again = rows[number % len(rows)], number // len(rows)
    return {key: text.replace(" ", f" {again}") if again else text for key, text in row.items()}


def measure(path: Path) -> dict[str, Any]:
    source = SourceConfig.model_construct(
        path=str(path), format="auto", columns={"prompt": "question", "completion": "answer"}
    )
    began = time.process_time()
    cleaned = clean({"clean.jsonl": open_one(source, "train")}, path.with_suffix(""), NEAR)
    seconds, (only,) = time.process_time() - began, cleaned.sources
    status = Path("/proc/self/status").read_text(encoding="ascii")  # ru_maxrss has the parent's peak, too
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024
    return {"rows": only.rows, "bytes": path.stat().st_size, "left_out": cleaned.left_out, "cpu_seconds": seconds,
            "rows_per_cpu_s": only.rows / seconds, "peak_bytes": peak}  # fmt: skip


def template(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Rows that begin with the same text, as long as their own."""
    shared = " ".join(row["question"] for row in rows[:2])[:600]
    began = time.process_time()
    with Repeats(NEAR) as repeats:
        for i, row in enumerate(rows):
            own = f"{row['question']} {row['answer']}"[:600]
            repeats.add(Example("f", i, prompt="", completion=f"{shared} {own}"))
        added = time.process_time() - began
        left_out = len(repeats.find())
    return {"rows": len(rows), "left_out": left_out, "cpu_seconds_to_read": added,
            "cpu_seconds_to_compare": time.process_time() - began - added}  # fmt: skip


def alike(number: int) -> dict[str, Any]:
    """How long rows of one template take, and how many of the copies planted among them are left out."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(3000)]
    template = rng.choices(words, k=80)
    texts: list[list[str]] = []
    for _ in range(number):
        own = list(template)
        for at in rng.sample(range(len(own)), 8):
            own[at] = rng.choice(words)
        texts.append(own)
    texts += [["planted", *own[1:]] for own in texts[: number // 100]]
    began = time.process_time()
    with Repeats(NEAR) as repeats:
        for i, own in enumerate(texts):
            repeats.add(Example("f", i, completion=" ".join(own), is_text=True))
        left_out = repeats.find()
    return {"rows": len(texts), "cpu_seconds": time.process_time() - began, "left_out": len(left_out),
            "planted": number // 100, "planted_left_out": sum(row >= number for row in left_out)}  # fmt: skip


if __name__ == "__main__":
    main()
