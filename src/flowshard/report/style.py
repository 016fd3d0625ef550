"""The page's style and its only script."""

LIGHT = {
    "page": "#ffffff",
    "panel": "#f6f7f9",
    "text": "#1b1d21",
    "muted": "#5a5f68",
    "grid": "#dfe2e7",
    "c1": "#0072b2",
    "c2": "#d55e00",
    "c3": "#007a5a",
    "c4": "#aa4499",
    "c5": "#8a6500",
    "c6": "#332288",
    "c7": "#882255",
    "c8": "#666666",
}
"""Colours by their use; c1 to c8 are those of lines, told apart with any kind of colour vision (after Okabe and Ito, and
Tol) and at a contrast of at least 3 to the panel (https://www.w3.org/TR/WCAG21/#non-text-contrast)."""
DARK = {
    "page": "#15171a",
    "panel": "#1d2024",
    "text": "#e8eaed",
    "muted": "#a3a8b0",
    "grid": "#363a41",
    "c1": "#56b4e9",
    "c2": "#ff8a3d",
    "c3": "#2fc79c",
    "c4": "#e58ad0",
    "c5": "#e8b923",
    "c6": "#a9a1f5",
    "c7": "#f0718f",
    "c8": "#b4b4b4",
}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; max-width: 1240px; padding: 24px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}}
h1 {{ font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 19px; margin: 36px 0 12px; }}
h3 {{ font-size: 15px; margin: 0; }}
small, .note, .about {{ color: var(--muted); font-size: 13px; font-weight: normal; }}
.about {{ margin: 4px 0 0; overflow-wrap: anywhere; }}
.note {{ margin: 2px 0 0; }}
.tiles {{ display: grid; gap: 12px; margin: 20px 0 0; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }}
.tiles > div, figure, details {{ background: var(--panel); border-radius: 8px; padding: 12px 14px; }}
.tiles dt {{ color: var(--muted); font-size: 13px; }}
.tiles dd {{ margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }}
.tiles dd small {{ display: block; }}
.progress {{ height: 6px; margin-top: 8px; border-radius: 3px; background: var(--grid); overflow: hidden; }}
.progress i {{ display: block; height: 100%; background: var(--c1); }}
.charts {{ display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); align-items: start; }}
figure {{ margin: 0; position: relative; min-width: 0; }}
svg {{ display: block; width: 100%; height: auto; margin-top: 6px; touch-action: pan-y; }}
svg text {{ fill: var(--muted); font-size: 13px; font-variant-numeric: tabular-nums; }}
.grid {{ stroke: var(--grid); stroke-width: 1; fill: none; }}
.line {{ fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }}
.faint {{ stroke-width: 1; opacity: 0.4; }}
.marks {{ fill: none; stroke-width: 6; stroke-linecap: round; }}
.area {{ opacity: 0.85; }}
.pointer {{ stroke: var(--muted); stroke-width: 1; fill: none; }}
.legend {{ list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0 0; padding: 0; font-size: 13px; }}
.legend li {{ overflow-wrap: anywhere; }}
.legend i, .values i {{ display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }}
.values {{
  position: absolute; top: 64px; pointer-events: none; padding: 6px 10px; border-radius: 6px; font-size: 13px;
  background: var(--page); border: 1px solid var(--grid); font-variant-numeric: tabular-nums;
}}
.values p {{ margin: 0; }}
.row {{ margin: 10px 0 2px; font-size: 13px; overflow-wrap: anywhere; }}
.bar {{ display: flex; height: 18px; }}
.bar i {{ display: block; }}
.scroll {{ overflow-x: auto; }}
.strip {{ display: flex; gap: 10px; overflow-x: auto; padding-bottom: 6px; }}
.strip figure {{ flex: 0 0 auto; padding: 0; background: none; }}
.strip img, .strip video {{ display: block; height: 160px; width: auto; border-radius: 6px; }}
.strip video {{ cursor: pointer; }}
.strip figcaption {{ color: var(--muted); font-size: 13px; }}
.prompt {{ margin: 16px 0 6px; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; vertical-align: top; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--grid); }}
th {{ color: var(--muted); font-weight: normal; }}
thead th {{ white-space: nowrap; }}
details {{ margin-top: 10px; }}
summary {{ cursor: pointer; }}
pre {{ margin: 10px 0 0; overflow-x: auto; font: 13px/1.45 ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace; }}
@media (max-width: 700px) {{
  body {{ padding: 16px; }}
  .charts {{ grid-template-columns: minmax(0, 1fr); }}
  .tiles {{ grid-template-columns: repeat(2, minmax(0, 1fr)); }}
  svg text {{ font-size: 17px; }}
}}
@media print {{ .charts, figure {{ break-inside: avoid; }} }}
"""

SCRIPT = """
// A clip plays and stops at a click or a key.
for (const clip of document.querySelectorAll("video")) {
  const turn = () => { if (clip.paused) clip.play(); else clip.pause(); };
  clip.addEventListener("click", turn);
  clip.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); turn(); }
  });
}
// Shows the values of a chart's lines at the step under the pointer.
for (const chart of document.querySelectorAll("figure.chart")) {
  const svg = chart.querySelector("svg"), box = chart.querySelector(".values"), rule = svg.querySelector(".pointer");
  const low = Number(svg.dataset.low), high = Number(svg.dataset.high);
  const [LEFT, RIGHT, TOP, BOTTOM] = svg.dataset.plot.split(",").map(Number);
  const numbers = (text) => text.split(",").map((one) => (one === "" ? NaN : Number(one)));
  let lines = null;
  const hide = () => { box.hidden = true; rule.setAttribute("d", ""); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    lines = lines || [...svg.querySelectorAll("path[data-x]")].map((path) => (
      { label: path.dataset.label, colour: path.dataset.colour, x: numbers(path.dataset.x), y: numbers(path.dataset.y) }
    ));
    const place = svg.getBoundingClientRect();
    const across = (event.clientX - place.left) / place.width * svg.viewBox.baseVal.width;
    const wanted = low + (across - LEFT) / (RIGHT - LEFT) * (high - low);
    let step = NaN;
    for (const line of lines) for (const x of line.x)
      if (!(Math.abs(step - wanted) <= Math.abs(x - wanted))) step = x;
    box.replaceChildren();
    const row = (text, colour) => {
      const entry = document.createElement("p"), patch = document.createElement("i");
      if (colour) { patch.style.background = colour; entry.append(patch); }
      entry.append(text);
      box.append(entry);
    };
    row(`step ${step.toLocaleString("en")}`);
    for (const line of lines) {
      let best = 0;
      line.x.forEach((x, index) => { if (Math.abs(x - step) < Math.abs(line.x[best] - step)) best = index; });
      const of = line.x[best] === step ? "" : ` (step ${line.x[best].toLocaleString("en")})`;
      row(`${line.label} ${Number.isNaN(line.y[best]) ? "no number" : line.y[best]}${of}`, line.colour);
    }
    rule.setAttribute("d", `M${LEFT + (step - low) / (high - low) * (RIGHT - LEFT)} ${TOP}V${BOTTOM}`);
    box.hidden = false;
    const left = event.clientX - chart.getBoundingClientRect().left;
    const room = chart.clientWidth - box.offsetWidth - 4;
    box.style.left = `${Math.max(4, Math.min(left + 14, room))}px`;
  });
}
"""
