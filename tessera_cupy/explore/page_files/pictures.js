// The pictures, as SVG in tokens: the mask, the tiles, one step, and the video.

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const box = (x, y, w, h) => `M${x} ${y}h${w}v${h}h${-w}z`;
const lineHeight = (tiles) => tiles.q * 1.2;

function hatch(id) {
  const lines = make("line", { x1: 0, y1: 0, x2: 0, y2: 6 });
  return make("pattern", { id, class: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, lines);
}

// Hatches keep their distance on the screen, whatever the tokens of a pixel.
function fitHatch(svg, id) {
  const pattern = svg.querySelector("#" + id);
  const width = svg.getBoundingClientRect().width;
  if (pattern && width)
    pattern.setAttribute("patternTransform", `scale(${svg.viewBox.baseVal.width / width}) rotate(45)`);
}

function drawMask(svg, o) {
  const width = o.ke[o.nk], height = o.qe[o.nq], paths = ["", "", ""];
  for (let i = 0; i < o.nq; i++)
    for (let j = 0; j < o.nk; j++) {
      const kind = o.kind(i, j);
      if (kind) paths[kind] += box(o.ke[j], o.qe[i], o.ke[j + 1] - o.ke[j], o.qe[i + 1] - o.qe[i]);
    }
  const edged = Math.max(o.nq, o.nk) <= 64 && !paths[2] ? " edged" : "";
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(
    make("rect", { width, height, class: "skipped" }),
    make("path", { d: paths[1], class: "kept" + edged }),
    make("path", { d: paths[2], class: "partial" }),
    make("path", { d: paths[2] ? wantedEntries(o) : "", class: "kept" }),
    make("g", { id: "mask-marks" }),
  );
}

// Exactly what a mask with token bits keeps: tiles hold that, and nothing else as wanted.
function wantedEntries(o) {
  const t = o.tiles;
  let d = "";
  t.runs.forEach((runs, tile) => {
    for (let p = t.piece_offsets[tile]; p < t.piece_offsets[tile + 1]; p++)
      for (const [first, end, member] of t.bands[t.piece_bands[p]])
        for (const [top, q, rows] of member ? runs : []) {
          const a = Math.max(first, top), b = Math.min(end, top + rows);
          if (a < b) d += box(t.piece_kv0[p], q + a - top, t.piece_length[p], b - a);
        }
  });
  return d;
}

function drawTiles(svg, o) {
  const t = o.tiles, line = lineHeight(t), colours = ["", "", "", ""];
  // At the scale of the mask, or at up to twice that where all tiles fit.
  let vain = "", steps = "", wide = o.ke[o.nk] / 2;
  t.steps.forEach((count, tile) => {
    wide = Math.max(wide, count * t.kv);
    for (let step = 0; step < count; step++) {
      const parts = o.computes(tile, step), x = step * t.kv, y = tile * line;
      steps += box(x, y, t.kv, t.q);
      for (let part = 0; part * t.part < t.q; part++)
        if ((parts >> part) & 1) vain += box(x, y + part * t.part, t.kv, t.part);
    }
    for (let p = t.piece_offsets[tile]; p < t.piece_offsets[tile + 1]; p++)
      for (const [first, end, member] of t.bands[t.piece_bands[p]])
        if (member)
          colours[t.piece_step[p] % 4] += box(
            t.piece_step[p] * t.kv + t.piece_column[p], tile * line + first, t.piece_length[p], end - first);
  });
  const height = t.steps.length * line, pieces = t.piece_step.length;
  const mean = pieces ? t.piece_length.reduce((a, b) => a + b, 0) / pieces : 0;
  const edged = mean * 440 > 4 * wide ? " edged" : "";
  svg.setAttribute("viewBox", `0 0 ${wide} ${height}`);
  svg.replaceChildren(
    make("defs", {}, hatch("hatch-tiles")),
    make("path", { d: vain, class: "vain" }),
    ...colours.map((d, n) => make("path", { d, class: `s${n}${edged}` })),
    make("path", { d: steps, class: t.kv * 440 < 16 * wide ? "outline thin" : "outline" }),
    make("g", { id: "tiles-marks" }),
  );
  fitHatch(svg, "hatch-tiles");
}

// One step enlarged; `marked` are the parts of pieces that are pointed at.
function drawLens(svg, o, tile, step, marked) {
  const t = o.tiles, parts = o.computes(tile, step), unit = t.kv / 320;
  let vain = "", work = "";
  for (let part = 0; part * t.part < t.q; part++)
    if ((parts >> part) & 1) vain += box(0, part * t.part, t.kv, t.part);
  const labels = [];
  for (let p = t.piece_offsets[tile]; p < t.piece_offsets[tile + 1]; p++) {
    if (t.piece_step[p] !== step) continue;
    const members = t.bands[t.piece_bands[p]].filter((band) => band[2]);
    for (const [first, end] of members) work += box(t.piece_column[p], first, t.piece_length[p], end - first);
    const pixels = t.piece_length[p] / unit;
    if (!members.length || pixels < 14) continue;
    const x = t.piece_column[p] + t.piece_length[p] / 2;
    const [first, end] = members.reduce((a, b) => (b[1] - b[0] > a[1] - a[0] ? b : a));
    const across = pixels >= 86, room = (across ? 1 : (end - first) / unit / 80);
    if (room < 1) continue;
    const y = (first + end) / 2, turn = across ? {} : { transform: `rotate(-90 ${x} ${y})` };
    labels.push(make("text", { x, y, "font-size": 12 * unit, ...turn }, span(t.piece_kv0[p], t.piece_length[p])));
  }
  svg.setAttribute("viewBox", `0 0 ${t.kv} ${t.q}`);
  svg.replaceChildren(
    make("defs", {}, hatch("hatch-lens")),
    make("path", { d: vain, class: "vain" }),
    make("path", { d: work, class: `s${step % 4} edged` }),
    ...labels,
    make("path", {
      class: "here",
      d: marked.map((m) => box(t.piece_column[m.piece], m.first, t.piece_length[m.piece], m.end - m.first)).join(""),
    }),
  );
  fitHatch(svg, "hatch-lens");
}

// Frames of the grid, with the block's queries as squares and its keys as dots.
function drawVideo(svg, o, i, j) {
  const { grid, order } = o.scene, keys = o.scene.kv_order || order;
  const [frames, rows, columns] = grid.size, across = Math.min(frames, 4);
  const wide = columns + 2, high = rows + 5;
  const place = (token) => {
    const frame = Math.floor(token / (rows * columns)), rest = token % (rows * columns);
    return [(frame % across) * wide + (rest % columns), Math.floor(frame / across) * high + 4 + Math.floor(rest / columns)];
  };
  const children = [];
  for (let f = 0; f < frames; f++) {
    const x = (f % across) * wide, y = Math.floor(f / across) * high;
    children.push(make("text", { x, y: y + 3 }, `frame ${f}`));
    children.push(make("rect", { x, y: y + 4, width: columns, height: rows, class: "frame" }));
  }
  const squares = order.slice(o.qe[i], o.qe[i + 1]).map((token) => box(...place(token), 1, 1)).join("");
  children.push(make("path", { d: squares, class: "kept" }));
  for (const token of keys.slice(o.ke[j], o.ke[j + 1])) {
    const [x, y] = place(token);
    children.push(make("circle", { cx: x + 0.5, cy: y + 0.5, r: 0.42, class: "dot" }));
  }
  svg.setAttribute("viewBox", `0 0 ${across * wide - 2} ${Math.ceil(frames / across) * high}`);
  svg.replaceChildren(...children);
}

function drawBar(svg, figures) {
  const width = 300, height = 12, whole = Math.max(figures.all_pairs, figures.issued_pairs);
  const at = (pairs) => (width * pairs) / whole;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(
    make("defs", {}, hatch("hatch-bar")),
    make("rect", { width: at(figures.issued_pairs), height, class: "vain" }),
    make("rect", { width: at(figures.active_pairs), height, class: "kept" }),
    make("path", { d: box(0, 0, at(figures.all_pairs), height), class: "outline" }),
  );
  fitHatch(svg, "hatch-bar");
}

const number = (n) => n.toLocaleString("en-US");
const span = (first, count) => (count === 1 ? number(first) : `${number(first)}\u2013${number(first + count - 1)}`);
