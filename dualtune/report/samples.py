"""The samples of a report: how the answers to run.sample_prompts changed over the evaluations, from samples.jsonl."""

from __future__ import annotations

from pathlib import Path

from dualtune.errors import FormatError
from dualtune.hooks import SampleRecord
from dualtune.io.untrusted import parse_object
from dualtune.report.json_lines import read_lines
from dualtune.report.page import as_text, scrolling
from dualtune.train.state.run_dir import SAMPLES

MAX_BYTES = 1 << 26  # of the file
MAX_LINE = 1 << 20  # bytes
MAX_TEXT = 2000  # characters of a prompt or an answer
MAX_SHOWN = 200  # answers to a prompt; the last ones
MAX_PROMPTS = 16  # shown; the last ones: a config has at most 8, and a resumed run may have others


def samples(run_dir: Path) -> str:
    """Return the section, with a notice on what is damaged; empty if the run has no samples."""
    path = run_dir / SAMPLES
    if not path.exists():
        return ""
    records, notice = read_lines(path, sample, max_bytes=MAX_BYTES, max_line=MAX_LINE)
    by_prompt: dict[str, list[SampleRecord]] = {}
    for record in records:
        by_prompt.setdefault(record.prompt, []).append(record)
    if not by_prompt and not notice:
        return ""
    shown = [*by_prompt.values()][-MAX_PROMPTS:]
    some = f"<p class=hint>The last {MAX_PROMPTS} of {len(by_prompt):,} prompts.</p>\n"
    return f"<h2>Samples</h2>\n{notice}{some * (len(shown) < len(by_prompt))}{''.join(map(_answers, shown))}"


def sample(line: bytes, where: str) -> SampleRecord:
    """Return a row of samples.jsonl, its texts cut to MAX_TEXT characters. FormatError for what is none."""
    row = parse_object(line, where)
    step, prompt, answer = (row.get(key) for key in ("step", "prompt", "answer"))
    if type(step) is not int or not isinstance(prompt, str) or not isinstance(answer, str):
        raise FormatError(f"{where}: must have an integer step and the texts prompt and answer")
    return SampleRecord(step, prompt[:MAX_TEXT], answer[:MAX_TEXT])


def _answers(records: list[SampleRecord]) -> str:
    rows = "".join(
        f"<tr><td>{record.step:,}</td><td>{as_text(record.answer)}</td></tr>\n" for record in records[-MAX_SHOWN:]
    )
    table = scrolling("Samples", ("step", "answer"), rows)
    return f'<details class=events open><summary dir="auto">{as_text(records[0].prompt)}</summary>\n{table}</details>\n'
