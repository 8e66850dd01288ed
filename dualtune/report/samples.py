"""The samples of a report: how the answers to run.sample_prompts changed over the evaluations, from samples.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dualtune.errors import FormatError
from dualtune.hooks import SampleRecord
from dualtune.io.untrusted import open_file, parse_object
from dualtune.report.page import as_text
from dualtune.train.state.run_dir import SAMPLES

MAX_BYTES = 1 << 26  # of the file
MAX_LINE = 1 << 20  # bytes
MAX_TEXT = 2000  # characters of a prompt or an answer
MAX_SHOWN = 200  # answers to a prompt; the last ones


def samples(run_dir: Path) -> str:
    """Return the section, empty if the run has no samples. FormatError if their file is too large."""
    path = run_dir / SAMPLES
    if not path.exists():
        return ""
    by_prompt: dict[str, list[SampleRecord]] = {}
    for record in _read(path):
        by_prompt.setdefault(record.prompt, []).append(record)
    return f"<h2>Samples</h2>\n{''.join(map(_answers, by_prompt.values()))}" if by_prompt else ""


def sample_of(line: bytes) -> SampleRecord | None:
    """Return a row of samples.jsonl, its texts cut to MAX_TEXT characters; None if it is damaged."""
    try:
        row = parse_object(line, SAMPLES)
    except (FormatError, ValueError):
        return None
    step, prompt, answer = (row.get(key) for key in ("step", "prompt", "answer"))
    if type(step) is not int or not isinstance(prompt, str) or not isinstance(answer, str):
        return None
    return SampleRecord(step, prompt[:MAX_TEXT], answer[:MAX_TEXT])


def _read(path: Path) -> Iterator[SampleRecord]:
    with open_file(path) as file:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise FormatError(f"{path}: {size} bytes, at most {MAX_BYTES} are allowed")
        while line := file.readline(MAX_LINE):
            if (record := sample_of(line)) is not None:
                yield record


def _answers(records: list[SampleRecord]) -> str:
    rows = "".join(
        f"<tr><td>{record.step:,}</td><td>{as_text(record.answer)}</td></tr>\n" for record in records[-MAX_SHOWN:]
    )
    return (
        f'<details class=events open><summary dir="auto">{as_text(records[0].prompt)}</summary>\n'
        '<div class="scroll" role="region" aria-label="Samples" tabindex="0"><table>\n'
        "<thead><tr><th scope=col>step</th><th scope=col>answer</th></tr></thead>\n"
        f"<tbody>\n{rows}</tbody></table></div></details>\n"
    )
