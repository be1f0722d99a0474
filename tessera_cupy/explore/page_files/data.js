// What is embedded, and what of it there is to choose.

async function readData() {
  const text = document.getElementById("data").textContent.trim();
  if (typeof DecompressionStream === "undefined")
    throw new Error("This browser cannot unpack the page's data. Open it in a browser of 2023 or later.");
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = await new Response(stream).json();
  data.views.forEach((view) => { view.key = keyOf(data.scenes[view.scene], view); });
  return data;
}

const CONTROLS = ["model", "rule", "head", "block", "mapping", "gpu"];
// In this order: what a mapping can be depends on the GPU.
const DECIDED = ["model", "rule", "head", "block", "gpu", "mapping"];

function keyOf(scene, view) {
  return {
    model: scene.grid && scene.grid.model ? scene.grid.model : "given",
    rule: scene.rule ? scene.rule.name : "given",
    head: String(scene.head),
    block: scene.mask.block_size.join("x"),
    mapping: view.asked,
    gpu: view.gpu.name,
  };
}

// The words of an option; `view` is any that has it.
function wordsOf(data, name, view) {
  const scene = data.scenes[view.scene];
  if (name === "model" && scene.grid)
    return `${scene.grid.model} (${scene.grid.size.join("x")})`;
  if (name === "rule" && scene.rule) return scene.rule.title;
  if (name === "mapping" && view.asked === "auto")
    return `auto: ${data.plans[view.plan].mapping}`;
  if (name === "mapping") {
    const [q, kv] = view.asked.split("-");
    return `${q} Q, ${kv} KV`;
  }
  if (name === "block" && scene.mask.slices) return `${scene.mask.block_size[0]} by single keys`;
  return view.key[name];
}

// The views that agree with what is decided so far, control by control, and their options.
function narrow(data, wanted) {
  let views = data.views;
  const options = {}, chosen = {};
  for (const name of DECIDED) {
    options[name] = new Map();
    for (const view of views)
      if (!options[name].has(view.key[name])) options[name].set(view.key[name], view);
    chosen[name] = options[name].has(wanted[name]) ? wanted[name] : options[name].keys().next().value;
    views = views.filter((view) => view.key[name] === chosen[name]);
  }
  return { options, chosen, view: views[0] };
}

function bitsOf(text, rows, columns) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const width = Math.ceil(columns / 8);
  return (row, column) => (bytes[row * width + (column >> 3)] >> (column & 7)) & 1;
}

// A scene and a layout with what the pictures look up in them.
function opened(data, view) {
  const scene = data.scenes[view.scene], tiles = data.layouts[view.layout];
  const { q_edges: qe, kv_edges: ke } = scene.mask;
  const nq = qe.length - 1, nk = ke.length - 1;
  const kept = bitsOf(scene.mask.kept, nq, nk), partial = bitsOf(scene.mask.partial, nq, nk);
  const firstStep = [];
  tiles.steps.reduce((sum, n, t) => { firstStep[t] = sum; return sum + n; }, 0);
  return {
    view, scene, tiles, plan: data.plans[view.plan], qe, ke, nq, nk, firstStep,
    kind: (i, j) => (kept(i, j) ? 1 : partial(i, j) ? 2 : 0),
    computes: (tile, step) => tiles.step_parts[firstStep[tile] + step],
  };
}

// The last block that begins at or before a token and is not empty.
function blockOf(edges, token) {
  let low = 0, high = edges.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (edges[middle] <= token) low = middle; else high = middle;
  }
  return low;
}

// Pieces that hold (query, key) pairs of a block: {piece, tile, rows, member}.
function holders(o, i, j) {
  const q0 = o.qe[i], q1 = o.qe[i + 1], k0 = o.ke[j], k1 = o.ke[j + 1], found = [];
  const t = o.tiles;
  t.runs.forEach((runs, tile) => {
    const mine = runs.filter(([, q, rows]) => q < q1 && q + rows > q0);
    if (!mine.length) return;
    for (let p = t.piece_offsets[tile]; p < t.piece_offsets[tile + 1]; p++) {
      if (t.piece_kv0[p] >= k1 || t.piece_kv0[p] + t.piece_length[p] <= k0) continue;
      for (const [top, q, rows] of mine) {
        const first = top + Math.max(0, q0 - q), end = top + Math.min(rows, q1 - q);
        for (const [a, b, member] of t.bands[t.piece_bands[p]])
          if (a < end && b > first)
            found.push({ piece: p, tile, step: t.piece_step[p], first: Math.max(a, first), end: Math.min(b, end), member });
      }
    }
  });
  return found;
}
