"""The style of the preview page: light and dark, for narrow and wide screens. The filters need no script."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --text: #1d2127; --dim: #59616c; --page: #f6f7f9; --card: #fff; --line: #d9dde3;
  --target: #c6efce; --target-line: #1f7a3a; --chip: #e6e9ee; --bar: #2f7d4a; --late: #b3661a; --accent: #1d5fbf;
  --warn: #fff3cf; --warn-line: #7d5c00; --bad: #fde3e1; --bad-line: #b3261e; --assistant: #eef7f0; --user: #edf3fc;
  --system: #f3f0f8; --tool: #fbf4e6 }
@media (prefers-color-scheme: dark) { :root { --text: #e7e9ec; --dim: #a3abb6; --page: #121417; --card: #1b1e23;
  --line: #363c45; --target: #1d4a2b; --target-line: #6fce8d; --chip: #2e343d; --bar: #5cb87a; --late: #e0a05c;
  --accent: #8ab8ff; --warn: #3d330f; --warn-line: #e0bb4a; --bad: #42201e; --bad-line: #ff9d95; --assistant: #17251c;
  --user: #172335; --system: #231f2e; --tool: #2b2415 } }
* { box-sizing: border-box }
body { margin: 0; color: var(--text); background: var(--page); font: 1rem/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem }
h1 { margin: 0 0 .25rem; font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere }
h2 { margin: 2.25rem 0 .75rem; font-size: 1.15rem }
h3 { margin: 0; font-size: .95rem; overflow-wrap: anywhere }
p { margin: .25rem 0 }
h3 .dim { font-weight: normal; font-size: .85rem }
.dim, dt, caption, th, .axis { color: var(--dim) }
.notice { margin: .75rem 0; padding: .6rem .9rem; border-left: .25rem solid var(--warn-line); border-radius: .25rem;
  background: var(--warn); overflow-wrap: anywhere }

.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0;
  padding: 0; list-style: none }
.tiles li { padding: .75rem 1rem; border: 1px solid var(--line); border-radius: .5rem; background: var(--card) }
.tiles b { display: block; font-size: 1.4rem; line-height: 1.2; font-variant-numeric: tabular-nums }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .3rem 1.25rem; margin: 0 }
dd { margin: 0; overflow-wrap: anywhere }

.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
caption { padding-bottom: .35rem; text-align: left; font-size: .9rem }
th, td { padding: .2rem .75rem .2rem 0; text-align: right; vertical-align: middle; font-weight: normal;
  white-space: nowrap }
th:first-child { text-align: left }
thead th { border-bottom: 1px solid var(--line); font-size: .85rem }
.sources th[scope=row] { min-width: 11rem; white-space: normal; overflow-wrap: anywhere; color: var(--text) }
.bars td:last-child { width: 100%; padding-right: 0 }
.bars svg { display: block; width: 100%; height: 1rem }
rect { fill: var(--bar) } .late rect { fill: var(--late) }

.legend { display: flex; flex-wrap: wrap; gap: .35rem 1.1rem; margin-bottom: 1rem; font-size: .875rem }
.legend span span { font: .85rem/1.6 ui-monospace, monospace }

.row { margin: 0 0 1rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card);
  overflow: hidden }
.row > header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .3rem .75rem; padding: .6rem .9rem;
  border-bottom: 1px solid var(--line) }
.row > header p { margin: 0; color: var(--dim); font-size: .875rem; overflow-wrap: anywhere }
.tag { display: inline-block; padding: 0 .55rem; border: 1px solid currentColor; border-radius: 1rem; color: var(--dim);
  font-size: .8rem; white-space: nowrap }
.tag.cut, .tag.duplicate { color: var(--warn-line) } .tag.bad { color: var(--bad-line) }
.row.bad p.reason { margin: 0; padding: .6rem .9rem; background: var(--bad); overflow-wrap: anywhere }
summary { padding: .5rem .9rem; color: var(--accent); cursor: pointer }
summary:focus-visible { outline: 3px solid var(--accent); outline-offset: -3px }
.turns { display: flex; flex-direction: column; gap: .6rem; padding: .9rem }
.turn { max-width: 88%; padding: .45rem .75rem .6rem; border: 1px solid var(--line); border-radius: .6rem;
  background: var(--user) }
.turn.assistant, .turn.completion { align-self: flex-end; background: var(--assistant) }
.turn.system, .turn.template, .turn.text { max-width: none; background: var(--system) }
.turn.tool { background: var(--tool) }
.turn h4 { margin: 0 0 .2rem; color: var(--dim); font-size: .78rem; font-weight: 600; letter-spacing: .02em }
.part { font: .875rem/1.65 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.part span { color: var(--dim) }
.frame { white-space: normal; font-size: .8rem; line-height: 1.5 }
.content span { color: var(--text) }
.call, .tools { margin: .4rem 0; padding: .35rem .6rem; border-left: .2rem solid var(--accent); background: var(--card);
  border-radius: .25rem }
.call::before, .tools::before { display: block; color: var(--accent); font: 600 .78rem/1.6 system-ui, sans-serif }
.call::before { content: "tool call" } .tools::before { content: "tools on offer" }
.part .target { color: var(--text); background: var(--target);
  box-shadow: inset 0 -2px var(--target-line) }
.part .special { padding: 0 .3rem; border: 1px solid var(--line); border-radius: .3rem; background: var(--chip);
  font-size: .78rem }
.part .special.target { background: var(--target); border-color: var(--target-line) }
.part span:hover { outline: 1px solid currentColor }
.cutmark { margin: 0 .9rem .9rem; padding: .35rem .75rem; border: 1px dashed var(--warn-line); border-radius: .4rem;
  color: var(--warn-line); font-size: .875rem }
@media (max-width: 40rem) {
  dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .5rem }
  .turn { max-width: 96% } .turns { padding: .6rem } }
"""


def filter_style(kinds: list[str]) -> str:
    """Return the style that hides rows by the chosen filter. A browser without :has shows all rows."""
    return "".join(f"main:has(#show-{kind}:checked) .row:not(.{kind}) {{ display: none }}\n" for kind in kinds)
