"""The page of a plan without its data: style, structure and drawing. It asks the network for nothing."""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1d1d1b; --quiet: #6a6a66; --line: #dededa; --empty: #f0f0ee;
  --held: #1f5fa8; --gained: #c8501e; --gone: #d9d9d5; --good: #2c7a4b; }
@media (prefers-color-scheme: dark) { :root { --page: #191918; --ink: #ececea; --quiet: #a3a39e; --line: #3a3a38;
  --empty: #242423; --held: #6fa8ea; --gained: #f0894f; --gone: #3a3a38; --good: #5cb884; } }
body { margin: 0 auto; max-width: 1500px; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 8px; }
p { margin: 4px 0; max-width: 75em; } .quiet { color: var(--quiet); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 12px 0; }
dt { color: var(--quiet); } dd { margin: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px 36px; margin: 18px 0; }
.tiles div span { display: block; font-size: 26px; font-variant-numeric: tabular-nums; }
.maps { display: flex; flex-wrap: wrap; gap: 24px; } .maps figure { margin: 0; overflow-x: auto; max-width: 100%; }
figcaption { margin-bottom: 6px; } canvas { display: block; }
.controls { display: flex; flex-wrap: wrap; gap: 8px 24px; align-items: center; margin: 8px 0 12px; }
.controls input[type=range] { width: 260px; vertical-align: middle; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--quiet); } td.text, th.text { text-align: left; }
tr.chosen td { font-weight: 600; } .scroll { overflow: auto; max-height: 560px; }
.bar { display: flex; height: 20px; margin: 2px 0; } .bar i { display: block; height: 100%; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 12px; align-items: center; }
.key { display: flex; flex-wrap: wrap; gap: 2px 18px; margin-top: 8px; }
.key i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }
#tip { position: fixed; pointer-events: none; display: none; background: var(--ink); color: var(--page);
  padding: 4px 8px; font-size: 13px; border-radius: 3px; z-index: 1; white-space: pre; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
@FACTS@
<div class="tiles">@TILES@</div>
@RESULT@
<h2>Slots and experts</h2>
<p class="quiet">Rows are slots, columns experts. @MAP_NOTE@</p>
<noscript><p>The map is drawn by a script in this file; the tables below need none.</p></noscript>
<div class="controls">
  <label>layer <input id="layer" type="range" min="0" max="0" value="0"> <output id="layer-name"></output></label>
  <label><input type="radio" name="mode" value="held" checked> part of the expert held</label>
  <label><input type="radio" name="mode" value="load"> tokens of the expert that it computes</label>
</div>
<div class="maps" id="maps"></div>
<h2>A step</h2>
<div class="bars" id="bars"></div><div class="key" id="key"></div>
@STEPS@
<h2>What has to travel</h2>
@TRANSFERS@
<h2>What was considered</h2>
@ALTERNATIVES@
<h2>Slots</h2>
<div class="scroll">@SLOTS@</div>
<div id="tip"></div>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const tip = document.getElementById("tip");
const slider = document.getElementById("layer");
slider.max = data.layers.length - 1;
const mode = () => document.querySelector("input[name=mode]:checked").value;
const channels = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
function mix(from, to, part) {
  const a = channels(from), b = channels(to);
  return "rgb(" + a.map((x, i) => Math.round(x + (b[i] - x) * part)).join(",") + ")";
}
function units(side, layer) {  // row -> {expert: units}
  return data[side].tables[data[side].of[layer]].map(flat => {
    const held = {};
    for (let i = 0; i < flat.length; i += 2) held[flat[i]] = flat[i + 1];
    return held;
  });
}
function loadOf(table, layer, row, expert) {  // tokens of an expert on a slot; holders of a whole share them
  const all = table.reduce((sum, held, at) =>
    data.rows[at].replica === data.rows[row].replica ? sum + (held[expert] || 0) : sum, 0);
  return all ? data.loads[layer][expert] * (table[row][expert] || 0) / all : 0;
}
const GAP = 8, LABEL = 76, BAR = 90;
function draw(side) {
  const layer = +slider.value, table = units(side, layer), before = data.before ? units("before", layer) : null;
  const figure = document.getElementById("map-" + side), canvas = figure.querySelector("canvas");
  const columns = data.experts, cell = Math.max(2, Math.min(26, Math.floor((data.before ? 480 : 1000) / columns)));
  const height = Math.max(6, Math.min(18, Math.floor(560 / data.rows.length)));
  const tops = [];
  let y = 18;
  data.rows.forEach((row, at) => {
    if (at && row.replica !== data.rows[at - 1].replica) y += GAP;
    tops.push(y); y += height;
  });
  const width = LABEL + columns * cell + 12 + BAR, ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = (y + 4) * ratio;
  canvas.style.width = width + "px"; canvas.style.height = y + 4 + "px";
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio); ctx.font = "11px system-ui, sans-serif"; ctx.textBaseline = "middle";
  const byLoad = mode() === "load";
  const loads = data.rows.map((row, at) => Object.keys(table[at]).map(e => loadOf(table, layer, at, +e)));
  const busiest = Math.max(1e-9, ...loads.flat());
  const sums = loads.map((list, at) => list.reduce((a, b) => a + b, 0) / data.rows[at].speed);
  const top = Math.max(1e-9, ...sums);
  ctx.fillStyle = css("--quiet");
  const step = Math.max(1, Math.ceil(28 / cell));
  for (let e = 0; e < columns && (columns - e) * cell > 16; e += step) ctx.fillText(e, LABEL + e * cell, 8);
  ctx.fillText("load per speed", LABEL + columns * cell + 12, 8);
  data.rows.forEach((row, at) => {
    const held = table[at], here = side === "before" ? row.before : row.after;
    ctx.fillStyle = css("--quiet");
    if (height >= 9 || at % 2 === 0) ctx.fillText(row.slot + (here ? "" : " gone"), 4, tops[at] + height / 2);
    ctx.fillStyle = css(here ? "--empty" : "--gone");
    ctx.fillRect(LABEL, tops[at], columns * cell, height - 1);
    for (const key in held) {
      const e = +key, part = byLoad ? loadOf(table, layer, at, e) / busiest : held[e] / data.size;
      const gained = side === "after" && before && held[e] > (before[at][e] || 0);
      ctx.fillStyle = mix(css("--empty"), css(gained ? "--gained" : "--held"), 0.18 + 0.82 * Math.min(1, part));
      ctx.fillRect(LABEL + e * cell, tops[at], Math.max(1, cell - (cell > 4 ? 1 : 0)), height - 1);
    }
    ctx.fillStyle = css("--held");
    ctx.fillRect(LABEL + columns * cell + 12, tops[at] + 1, BAR * 0.95 * sums[at] / top, height - 3);
    if (here) {  // where the bar would end if all of the replica were level
      const mine = data.rows.map((_, i) => i).filter(i => data.rows[i].replica === row.replica && data.rows[i][side]);
      const level = mine.reduce((a, i) => a + sums[i] * data.rows[i].speed, 0) /
        mine.reduce((a, i) => a + data.rows[i].speed, 0);
      ctx.fillStyle = css("--ink");
      ctx.fillRect(LABEL + columns * cell + 12 + BAR * 0.95 * level / top, tops[at], 1, height - 1);
    }
  });
  canvas.onmousemove = event => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, yy = event.clientY - box.top;
    const at = tops.findIndex(t => yy >= t && yy < t + height), e = Math.floor((x - LABEL) / cell);
    if (at < 0 || e < 0 || e >= columns) { tip.style.display = "none"; return; }
    const held = table[at][e] || 0, row = data.rows[at];
    tip.textContent = "slot " + row.slot + " (replica " + row.replica + "), expert " + e + ": " +
      (held === 0 ? "nothing" : held === data.size ? "whole" : held + "/" + data.size) +
      "\\nload of the expert " + data.loads[layer][e].toFixed(2) + ", here " + loadOf(table, layer, at, e).toFixed(2);
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 320) + "px";
    tip.style.top = event.clientY + 14 + "px";
  };
  canvas.onmouseleave = () => { tip.style.display = "none"; };
}
const sides = data.before ? ["before", "after"] : ["after"];
for (const side of sides) {
  const figure = document.createElement("figure");
  figure.id = "map-" + side;
  figure.innerHTML = "<figcaption>" + (data.before ? side : "the plan") + "</figcaption><canvas></canvas>";
  document.getElementById("maps").append(figure);
}
function drawAll() {
  document.getElementById("layer-name").textContent = data.layers[+slider.value];
  sides.forEach(draw);
}
slider.oninput = drawAll;
document.querySelectorAll("input[name=mode]").forEach(one => { one.onchange = drawAll; });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
const parts = Object.keys(data.parts), longest = Math.max(...data.steps.map(step => step.total));
const hue = i => "hsl(" + (210 + i * 47) % 360 + " 45% " + (46 + 10 * (i % 3)) + "%)";
for (const step of data.steps) {
  const bar = parts.map((part, i) =>
    "<i style='width:" + 100 * (step.parts[part] || 0) / longest + "%;background:" + hue(i) + "' title='" +
    data.parts[part] + " " + (step.parts[part] || 0).toPrecision(3) + " s'></i>").join("");
  document.getElementById("bars").insertAdjacentHTML("beforeend",
    "<span>" + step.name + "</span><div class='bar'>" + bar + "</div><span>" + step.text + "</span>");
}
document.getElementById("key").innerHTML = parts.map((part, i) => data.steps.some(step => step.parts[part] > 0) ?
  "<span><i style='background:" + hue(i) + "'></i>" + data.parts[part] + "</span>" : "").join("");
</script>
</body>
</html>
"""
