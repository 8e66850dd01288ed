/* The script of a run's report: it draws curves, sorts the table of runs, filters answers, copies commands, and keeps
   what the reader has chosen. */
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // --- curves ---------------------------------------------------------------------------------------------------
  const source = document.getElementById("numbers");
  const runs = source ? JSON.parse(source.textContent) : [];
  const alone = runs.length === 1;
  const MIB = 2 ** 20;
  const HIDDEN_EVENTS = new Set(["verdict", "found"]); // marks at every start and every end say nothing
  let axis = "step";
  let plots = [];

  const label = (run, what) => (alone ? what : what ? `${run.name}, ${what}` : run.name);
  const runColour = (index) => colour(`--run${index % 8}`);
  const runDash = (run) => (run.dash.length ? run.dash : undefined); // tells runs of one colour apart
  const line = (name, x, y, { size = 7, dots = x.length === 1, ...options }) => {
    const points = { show: dots, size, width: 2, fill: colour("--card") };
    return { name, table: [x, y], options: { ...options, points } };
  };

  /* A horizontal line over the whole run. */
  function limit(run, name, value) {
    const x = run.x[axis];
    const ends = x.length > 1 ? [x[0], x[x.length - 1]] : x;
    return line(name, ends, ends.map(() => value), { stroke: colour("--limit"), dash: [6, 4] });
  }

  /* The evaluations of a run, by a key of theirs that not each may have. */
  function evaluations(run, index, name) {
    const known = run.evals.filter((mark) => mark[name] !== undefined);
    const stroke = alone ? colour("--evaluation") : runColour(index);
    const look = { stroke, width: 1.5, dash: [2, 3], dots: true };
    const [at, values] = [axis, name].map((key) => known.map((mark) => mark[key]));
    return known.length ? [line(label(run, "evaluation"), at, values, look)] : [];
  }

  function lossLines(run, index) {
    const x = run.x[axis];
    const stroke = runColour(index);
    const found = [];
    if (alone) found.push(line("loss", x, run.series.loss, { stroke: colour("--faint"), width: 1 }));
    found.push(line(label(run, alone ? "smoothed" : ""), x, run.series.smooth, { stroke, width: 2, dash: runDash(run) }));
    found.push(...evaluations(run, index, "loss"));
    const { best } = run;
    const ring = { stroke: alone ? colour("--best") : stroke, size: 11 };
    if (best) found.push(line(label(run, "best"), [best[axis]], [best.loss], ring));
    return found;
  }

  const plain = (name, what, scale = 1) => (run, index) => {
    const numbers = run.series[name].map((value) => (value === null ? null : value / scale));
    const look = { stroke: runColour(index), width: 1.5, dash: runDash(run) };
    return [line(label(run, alone ? what : ""), run.x[axis], numbers, look)];
  };

  /* A metric of the objective, which other runs on the page may not have. */
  const measured = (name) => (run, index) =>
    name in run.series ? [...plain(name, "steps")(run, index), ...evaluations(run, index, name)] : [];
  const names = new Set(runs.flatMap((run) => run.measured));

  const PLOTS = {
    loss: { lines: lossLines, height: 320 },
    ...Object.fromEntries([...names].map((name) => [name, { lines: measured(name), height: 200 }])),
    lr: { lines: plain("lr", "learning rate"), height: 200 },
    grad_norm: { lines: plain("grad_norm", "norm"), limit: (run) => run.clip, limitName: "clipped above", height: 200 },
    tokens_per_s: { lines: plain("tokens_per_s", "tokens/s"), height: 200 },
    memory: {
      lines: plain("peak_bytes", "peak", MIB),
      limit: (run) => run.planned_bytes && run.planned_bytes / MIB,
      limitName: runs.some((run) => run.mapped_bytes) ? "planned, and mapped files" : "planned",
      height: 200,
    },
  };

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e5) return compact.format(value);
    return size > 0 && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(5)));
  }
  function duration(seconds) {
    if (seconds < 60) return `${number(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? `${number(seconds / 60)} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")}`;
  }
  const onAxis = (value) => (value === null || value === undefined ? "–" : axis === "seconds" ? duration(value) : number(value));

  /* The lines of a plot, without those that have no number. `of`: the run of a line. */
  function linesOf(plot) {
    const found = runs.flatMap((run, index) => plot.lines(run, index).map((one) => ({ ...one, of: run })));
    const drawn = found.filter((one) => one.table[1].some((value) => value !== null && value !== 0));
    if (!drawn.length || !plot.limit) return drawn;
    const limited = runs.filter((run) => run.x[axis].length && plot.limit(run));
    const isShared = new Set(limited.map(plot.limit)).size === 1;
    limited.sort((a, b) => b.x[axis].at(-1) - a.x[axis].at(-1)); // the longest run first
    const name = (run) => (isShared ? plot.limitName : label(run, plot.limitName));
    const ofLimit = (run) => ({ ...limit(run, name(run), plot.limit(run)), of: isShared ? undefined : run });
    return [...drawn, ...limited.slice(0, isShared ? 1 : undefined).map(ofLimit)];
  }

  function drawEvents(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = colour("--event");
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const mark of marks()) {
      const x = Math.round(chart.valToPos(mark[axis], "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
  const marks = () => runs.flatMap((run) => run.events.filter((mark) => !HIDDEN_EVENTS.has(mark.kind)));

  /* Say which events are at the cursor. */
  function tellEvents(chart) {
    const { left } = chart.cursor;
    const near = left < 0 ? [] : marks().filter((mark) => Math.abs(chart.valToPos(mark[axis], "x") - left) < 6);
    document.getElementById("event").textContent = near
      .slice(0, 3)
      .map((mark) => `step ${mark.step}: ${mark.kind}: ${mark.text}`)
      .join("\n");
  }

  /* Of several runs, each has one entry in the legend: that of its first line, with which the others come and go. */
  function leaderOf(lines, index) {
    const { of } = lines[index];
    return alone || !of ? index : lines.findIndex((other) => other.of === of);
  }
  const follow = (lines) => (chart, leader, { show }) =>
    lines.forEach((_, index) => {
      const isOther = leaderOf(lines, index) === leader - 1 && index !== leader - 1;
      if (show !== undefined && isOther) chart.setSeries(index + 1, { show });
    });

  function options(name, plot, lines, width) {
    const look = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const isLoss = name === "loss";
    return {
      width,
      height: plot.height,
      cursor: { sync: { key: "x" }, y: false },
      legend: { markers: { dash: (chart, index) => (chart.series[index].dash ? "dashed" : "solid") } },
      scales: { x: { time: false } },
      axes: [
        { ...look, values: (_, ticks) => ticks.map(onAxis), space: 70, size: 30 },
        { ...look, values: (_, ticks) => ticks.map(number), size: 62 },
      ],
      series: [
        { label: axis === "seconds" ? "time" : axis, value: (_, value) => onAxis(value) },
        ...lines.map((one, index) => ({
          label: one.name,
          value: (_, value) => number(value),
          class: leaderOf(lines, index) === index ? null : "follower",
          ...one.options,
        })),
      ],
      hooks: { draw: [drawEvents], setSeries: [follow(lines)], ...(isLoss ? { setCursor: [tellEvents] } : {}) },
    };
  }

  /* What a reader who does not see the plot is told. */
  function describe(title, lines) {
    const said = lines.map((one) => {
      const known = one.table[1].filter((value) => value !== null);
      return `${one.name}: ${known.length} points, from ${number(known[0])} to ${number(known[known.length - 1])}`;
    });
    return `${title}. ${said.join("; ")}`;
  }

  function draw() {
    plots.forEach((chart) => chart.destroy());
    plots = [];
    for (const [name, plot] of Object.entries(PLOTS)) {
      const place = document.getElementById(`plot-${name}`);
      const lines = linesOf(plot);
      place.parentElement.hidden = !lines.length;
      if (!lines.length) continue;
      place.removeAttribute("aria-labelledby");
      place.setAttribute("aria-label", describe(document.getElementById(`caption-${name}`).textContent, lines));
      const data = uPlot.join(lines.map((one) => one.table));
      plots.push(new uPlot(options(name, plot, lines, place.clientWidth), data, place));
    }
  }

  function moveCursor(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const chart = plots.find((one) => one.root.parentElement === event.currentTarget);
    if (!direction || !chart) return;
    event.preventDefault();
    const last = chart.data[0].length - 1;
    const before = chart.cursor.idx ?? (direction > 0 ? -1 : last + 1);
    const index = Math.min(last, Math.max(0, before + direction));
    chart.setCursor({ left: chart.valToPos(chart.data[0][index], "x"), top: 0 });
  }

  if (runs.length) {
    const said = document.createElement("p");
    said.id = "event";
    said.setAttribute("role", "status");
    document.getElementById("figure-loss").append(said);
    all('input[name="x"]').forEach((input) =>
      input.addEventListener("change", () => {
        axis = input.value;
        draw();
      }),
    );
    all(".plot").forEach((place) => place.addEventListener("keydown", moveCursor));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    addEventListener("resize", () =>
      plots.forEach((chart) => chart.setSize({ width: chart.root.parentElement.clientWidth, height: chart.height })),
    );
    draw();
  }

  // --- the table of runs ----------------------------------------------------------------------------------------
  /* Compare two cells: numbers before texts, and what is unknown at the end in both directions. */
  function compare(a, b, direction) {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    if (!Number.isNaN(x) && !Number.isNaN(y)) return direction * (x - y);
    return direction * a.localeCompare(b, "en", { numeric: true });
  }

  all("#runs .sort").forEach((button, column) =>
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      all("#runs thead th").forEach((one) => one.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort;
      const body = document.querySelector("#runs tbody");
      body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b), direction)));
    }),
  );

  // --- answers and commands -------------------------------------------------------------------------------------
  all('input[name="answers"]').forEach((input) =>
    input.addEventListener("change", () =>
      all(".answer").forEach((row) => {
        row.hidden = input.value !== "all" && row.dataset.kind !== input.value;
      }),
    ),
  );

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // a browser that does not let a file copy
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
  all(".copy").forEach((button) => {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  });

  // --- what the reader has chosen, kept while the page is loaded again ------------------------------------------
  const STORE = `dualtune ${location.pathname}`;
  const kept = stored();
  function stored() {
    try {
      return new Map(JSON.parse(sessionStorage.getItem(STORE)));
    } catch {
      return new Map(); // a browser that stores nothing for a file
    }
  }
  function keep(name, value) {
    kept.set(name, value);
    try {
      sessionStorage.setItem(STORE, JSON.stringify([...kept]));
    } catch {
      // then the choice is forgotten
    }
  }
  all('input[type="radio"]').forEach((input) => {
    if (kept.get(`choice ${input.name}`) === input.value && !input.checked) {
      input.checked = true;
      input.dispatchEvent(new Event("change"));
    }
    input.addEventListener("change", () => keep(`choice ${input.name}`, input.value));
  });
  all("details").forEach((one) => {
    const name = `open ${one.id || one.querySelector("summary").textContent}`;
    one.open = kept.get(name) ?? one.open;
    one.addEventListener("toggle", () => keep(name, one.open));
  });
})();
