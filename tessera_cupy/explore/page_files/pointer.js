// What is pointed at: one block, and one step that holds it, marked in all pictures and in words.

function text(parent, tag, words, attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = words;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

const KINDS = ["skipped", "kept", "kept in part"];
const range = (first, last) => (first === last ? `${first}` : `${first}\u2013${last}`);

function tokensOf(name, edges, boxes, block) {
  const count = edges[block + 1] - edges[block];
  if (!count) return `${name}: none`;
  const words = `${name} ${span(edges[block], count)}`;
  if (!boxes) return words;
  const [t0, t1, y0, y1, x0, x1] = boxes[block];
  const volume = (t1 - t0 + 1) * (y1 - y0 + 1) * (x1 - x0 + 1);
  const many = (one, first, last) => (first === last ? `${one} ${first}` : `${one}s ${first}\u2013${last}`);
  return `${words}: ${volume > count ? "within " : ""}${many("frame", t0, t1)}, ${many("row", y0, y1)}, ${many("column", x0, x1)}`;
}

// Places of a block in tiles, one a tile and step: where its wanted entries are, else the others.
function placesOf(found) {
  const wanted = found.filter((f) => f.member), places = new Map();
  for (const f of wanted.length ? wanted : found) {
    const key = `${f.tile} ${f.step}`;
    if (!places.has(key)) places.set(key, []);
    places.get(key).push(f);
  }
  return [...places.values()];
}

function placeWords(o, parts) {
  const t = o.tiles, { tile, step } = parts[0];
  const from = Math.min(...parts.map((f) => t.piece_column[f.piece]));
  const to = Math.max(...parts.map((f) => t.piece_column[f.piece] + t.piece_length[f.piece]));
  const first = Math.min(...parts.map((f) => f.first)), end = Math.max(...parts.map((f) => f.end));
  return `tile ${tile}, step ${step} (the last is ${t.steps[tile] - 1}): rows ${range(first, end - 1)}, columns ${range(from, to - 1)}`;
}

function placesWords(places) {
  const steps = new Map(), most = 8;
  for (const [{ tile, step }] of places) steps.set(tile, [...(steps.get(tile) || []), step]);
  const said = [...steps].slice(0, most).map(([tile, of]) => `tile ${tile}, step${of.length > 1 ? "s" : ""} ${of.join(", ")}`);
  return said.join("; ") + (steps.size > most ? `; and ${steps.size - most} tiles more` : "");
}

// Show a block; `near` is the (tile, step) that was pointed at, if any.
function show(o, i, j, near) {
  const t = o.tiles, found = holders(o, i, j), places = placesOf(found), kind = o.kind(i, j);
  let parts = near ? found.filter((f) => f.tile === near.tile && f.step === near.step) : [];
  if (!parts.length) parts = places[0] || [];
  const readout = document.getElementById("readout");
  readout.replaceChildren();
  text(text(readout, "p", ""), "b", `Block (${i}, ${j}): ${KINDS[kind]}`);
  text(readout, "p", tokensOf("Queries", o.qe, o.scene.q_boxes, i));
  text(readout, "p", tokensOf("Keys", o.ke, o.scene.kv_boxes, j));
  const vain = places.length > 0 && !places[0][0].member;
  if (!places.length) text(readout, "p", "In no tile: it costs nothing.");
  else {
    const words = places.length === 1 ? placeWords(o, places[0]) : placesWords(places);
    text(readout, "p", `${vain ? "Computed in vain in" : "In"} ${words}`, { id: "places" });
  }
  text(readout, "p", "Rows, columns, tiles and steps count from 0.", { class: "hint" });
  mark(o, i, j, parts, found, places);
}

function mark(o, i, j, parts, found, places) {
  const t = o.tiles, line = lineHeight(t);
  const block = box(o.ke[j], o.qe[i], o.ke[j + 1] - o.ke[j], o.qe[i + 1] - o.qe[i]);
  const at = parts[0], inMask = [], lens = document.getElementById("lens-part");
  if (at)
    for (let p = t.piece_offsets[at.tile]; p < t.piece_offsets[at.tile + 1]; p++) {
      if (t.piece_step[p] !== at.step) continue;
      for (const [first, end, member] of t.bands[t.piece_bands[p]])
        for (const [top, q, rows] of t.runs[at.tile]) {
          const a = Math.max(first, top), b = Math.min(end, top + rows);
          if (member && a < b) inMask.push(box(t.piece_kv0[p], q + a - top, t.piece_length[p], b - a));
        }
    }
  document.getElementById("mask-marks").replaceChildren(
    make("path", { d: inMask.join(""), class: inMask.length > 12 ? "halo thin" : "halo" }),
    make("path", { d: inMask.join(""), class: inMask.length > 12 ? "same-step thin" : "same-step" }),
    make("path", { d: block, class: "here" }),
  );
  const steps = places.map(([f]) => box(f.step * t.kv, f.tile * line, t.kv, t.q)).join("");
  const shown = found.filter((f) => !places.length || f.member === places[0][0].member);
  const pieces = shown.map((f) =>
    box(f.step * t.kv + t.piece_column[f.piece], f.tile * line + f.first, t.piece_length[f.piece], f.end - f.first));
  document.getElementById("tiles-marks").replaceChildren(
    make("path", { d: steps, class: "same-step" }),
    make("path", { d: pieces.join(""), class: "here" }),
  );
  lens.hidden = !at;
  if (at) {
    const rows = t.runs[at.tile].map(([, q, count]) => span(q, count)).join(", ");
    document.getElementById("lens-title").textContent =
      `Tile ${at.tile}, step ${at.step}: ${t.q} x ${t.kv}; its queries ${rows}, and the keys of each fragment`;
    drawLens(document.getElementById("lens"), o, at.tile, at.step, parts);
  }
  document.getElementById("video-part").hidden = !o.scene.order;
  if (o.scene.order) drawVideo(document.getElementById("video"), o, i, j);
}

// Tokens under the pointer, in the units of a picture's viewBox.
function underPointer(svg, event) {
  const rect = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  return [((event.clientX - rect.left) * view.width) / rect.width, ((event.clientY - rect.top) * view.height) / rect.height];
}

function inMask(o, x, y) {
  if (x < 0 || y < 0 || x >= o.ke[o.nk] || y >= o.qe[o.nq]) return null;
  return { i: blockOf(o.qe, Math.floor(y)), j: blockOf(o.ke, Math.floor(x)) };
}

function inTiles(o, x, y) {
  const t = o.tiles, line = lineHeight(t), tile = Math.floor(y / line), row = Math.floor(y - tile * line);
  const step = Math.floor(x / t.kv), column = Math.floor(x - step * t.kv);
  if (tile < 0 || tile >= t.steps.length || row >= t.q || step < 0 || step >= t.steps[tile]) return null;
  for (let p = t.piece_offsets[tile]; p < t.piece_offsets[tile + 1]; p++)
    if (t.piece_step[p] === step && column >= t.piece_column[p] && column < t.piece_column[p] + t.piece_length[p])
      return fromPiece(o, tile, p, row, column - t.piece_column[p]);
  return null;
}

// The block of a piece's entry; null in rows that a tile does not have.
function fromPiece(o, tile, p, row, column) {
  const t = o.tiles;
  for (const [top, q, rows] of t.runs[tile])
    if (row >= top && row < top + rows)
      return {
        i: blockOf(o.qe, q + row - top), j: blockOf(o.ke, t.piece_kv0[p] + column), near: { tile, step: t.piece_step[p] }, piece: p,
      };
  return null;
}

// From a piece to a neighbour in its tile, or in the tile above or below.
function walk(o, at, key) {
  const t = o.tiles, begin = (tile) => t.piece_offsets[tile], end = (tile) => t.piece_offsets[tile + 1];
  let { tile } = at.near, p = at.piece;
  if (key === "ArrowLeft") p = Math.max(begin(tile), p - 1);
  else if (key === "ArrowRight") p = Math.min(end(tile) - 1, p + 1);
  else {
    const down = key === "ArrowDown" ? 1 : -1, place = p - begin(tile);
    do tile += down; while (tile >= 0 && tile < t.steps.length && begin(tile) === end(tile));
    if (tile < 0 || tile >= t.steps.length) return at;
    p = Math.min(begin(tile) + place, end(tile) - 1);
  }
  const bands = t.bands[t.piece_bands[p]], wanted = bands.find((band) => band[2]) || bands[0];
  return fromPiece(o, tile, p, wanted[0], 0) || at;
}
