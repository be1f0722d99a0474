// Controls, figures, and what the pointer and the keys do.

const el = (id) => document.getElementById(id);
let data, current, at, pinned = false;

function choose(wanted) {
  const { options, chosen, view } = narrow(data, wanted);
  for (const name of CONTROLS) {
    const select = el(name);
    select.replaceChildren(
      ...[...options[name]].map(([value, example]) => new Option(wordsOf(data, name, example), value)));
    select.value = chosen[name];
  }
  const scene = current && current.view.scene;
  current = opened(data, view);
  pinned = false;
  drawMask(el("mask"), current);
  drawTiles(el("tiles"), current);
  writeAbout();
  writeFigures(view.figures);
  writeLegends();
  writeSentences();
  el("explain").textContent = current.plan.explain;
  // The same block under another mapping, else one that is kept near the middle.
  point(scene === view.scene && at ? { i: at.i, j: at.j } : middle(current));
}

function middle(o) {
  const rows = [...Array(o.nq).keys()].sort((a, b) => Math.abs(a - o.nq / 2) - Math.abs(b - o.nq / 2));
  for (const i of rows)
    for (let j = Math.floor(o.nk / 4); j < o.nk; j++) if (o.kind(i, j)) return { i, j };
  return { i: 0, j: 0 };
}

function point(to, follow = true) {
  at = to;
  show(current, at.i, at.j, at.near);
  const places = placesOf(holders(current, at.i, at.j));
  const near = at.near || (places.length && places[0][0]);
  if (!near) return;
  // Keys walk in the tiles from here.
  at.near = { tile: near.tile, step: near.step };
  if (at.piece === undefined) at.piece = near.piece ?? places[0][0].piece;
  if (follow) intoView(near.tile);
}

// Scrolls the list of tiles, and never the page.
function intoView(tile) {
  const scroll = el("tiles-scroll"), svg = el("tiles"), t = current.tiles;
  const scale = svg.getBoundingClientRect().height / svg.viewBox.baseVal.height;
  const top = tile * lineHeight(t) * scale, bottom = top + t.q * scale;
  if (top < scroll.scrollTop || bottom > scroll.scrollTop + scroll.clientHeight)
    scroll.scrollTop = Math.max(0, (top + bottom - scroll.clientHeight) / 2);
}

function writeAbout() {
  const { scene } = current, words = [];
  if (scene.grid && scene.grid.model)
    words.push(
      `${scene.rule.title}'s mask of head ${scene.head}, chosen from q and k that were made from ${scene.source}, ` +
      `on a grid of ${scene.grid.size.join("x")} = ${number(scene.grid.tokens)} tokens, ` +
      `cut down${scene.grid.model_text ? ", without text," : ""} from the ${scene.grid.model_grid} = ${number(scene.grid.model_tokens)} of ${scene.grid.model}.`);
  else words.push(`The mask of head ${scene.head}, ${number(current.qe[current.nq])} x ${number(current.ke[current.nk])} tokens.`);
  words.push("Times are predicted by a model of the GPU; nothing here was measured.");
  el("about").textContent = words.join(" ");
}

const BOUNDS = { matrix: "matrix products", softmax: "softmax", L2: "reads from L2", DRAM: "reads from memory" };

function writeFigures(f) {
  const { scene, view, plan, tiles } = current, parent = el("figures");
  const card = (title, name, value, unit, ...notes) => {
    const section = document.createElement("div");
    section.className = "figure";
    text(section, "h3", title);
    const line = text(section, "div", value, { class: "value", "data-figure": name, "data-value": f[name] });
    if (unit) text(line, "small", " " + unit);
    notes.forEach((note) => text(section, "p", note));
    parent.append(section);
    return section;
  };
  const percent = (x) => `${(100 * x).toFixed(1)} %`;
  parent.replaceChildren();
  const { block_size: size, ragged, slices } = scene.mask;
  const blocks = slices ? `slices of ${size[0]} queries by single keys, drawn in blocks of ${size[1]}`
    : `${ragged ? "ragged blocks, nominally" : "blocks of"} ${size.join(" x ")} tokens`;
  card("The mask keeps", "density", percent(f.density), "of the pairs", blocks,
    `run coverage ${f.run_coverage.toFixed(2)}: kept blocks beside another`);
  const counts = card("Tiles", "tiles", number(f.tiles), `of ${tiles.q} rows`);
  const steps = text(counts, "p", `${number(f.steps)} steps of ${tiles.kv} keys for a head`);
  steps.dataset.figure = "steps"; steps.dataset.value = f.steps;
  const tasks = text(counts, "p", `${number(f.tasks)} tasks for ${scene.heads} heads, ${number(f.split_tiles)} tiles split`);
  tasks.dataset.figure = "tasks"; tasks.dataset.value = f.tasks;
  const useful = card("Useful fraction", "useful_fraction", f.useful_fraction.toFixed(2), "of the work issued");
  const bar = make("svg", { class: "bar", role: "img", "aria-label": "active, issued and all pairs" });
  useful.append(bar);
  text(useful, "p", `${percent(f.active_pairs / f.all_pairs)} wanted, ${percent(f.issued_pairs / f.all_pairs)} issued, of all pairs`);
  drawBar(bar, f);
  card("Predicted time", "predicted_ms", f.predicted_ms.toPrecision(3), `ms on ${view.gpu.name}`,
    `predicted for all ${scene.heads} heads with this mask; limited most by ${BOUNDS[f.predicted_bound]}`,
    `dense attention: predicted ${f.predicted_dense_ms.toPrecision(3)} ms`);
  parent.dataset.plan = plan.name;
}

function writeLegends() {
  const fill = (id, items) => {
    el(id).replaceChildren(...items.map(([key, words]) => {
      const item = document.createElement("li");
      text(item, "i", "", { class: "key " + key });
      item.append(words);
      return item;
    }));
  };
  const { mask } = current.scene, some = (bits) => /[^A=]/.test(bits);
  fill("mask-legend", [
    ["kept", "kept"], ...(some(mask.partial) ? [["partial", "block kept in part"]] : []), ["skipped", "skipped"],
    ["here", "block pointed at"], ["step", "in the same step"]]);
  const parts = current.tiles.q > current.tiles.part;
  fill("tiles-legend", [
    ["steps", "wanted; colours tell steps apart"], ["vain", "computed in vain"],
    ...(parts ? [["skip", "part of a tile that skips the step"]] : [])]);
}

function writeSentences() {
  const used = current.plan.mapping.split("-"), list = el("sentences");
  list.replaceChildren();
  for (const [name, sentence] of Object.entries(data.sentences)) {
    const sides = [used[0] === name ? "Q" : "", used[1] === name ? "KV" : ""].filter(Boolean).join(" and ");
    text(list, "dt", sides ? `${name} (${sides} here)` : name, sides ? { class: "used" } : {});
    text(list, "dd", sentence);
  }
}

function listen() {
  el("controls").addEventListener("submit", (event) => event.preventDefault());
  el("controls").addEventListener("change", () =>
    choose(Object.fromEntries(CONTROLS.map((name) => [name, el(name).value]))));
  for (const [id, look] of [["mask", inMask], ["tiles", inTiles]]) {
    const svg = el(id);
    const found = (event) => look(current, ...underPointer(svg, event));
    svg.addEventListener("pointermove", (event) => {
      const to = event.pointerType === "touch" || pinned ? null : found(event);
      if (to && (to.i !== at.i || to.j !== at.j || to.piece !== undefined && to.piece !== at.piece)) point(to, id === "mask");
    });
    svg.addEventListener("click", (event) => {
      const to = found(event);
      if (!to) return;
      pinned = !pinned || to.i !== at.i || to.j !== at.j;
      point(to, id === "mask");
      el("readout").classList.toggle("pinned", pinned);
    });
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") pinned = false;
      if (!event.key.startsWith("Arrow")) return;
      event.preventDefault();
      pinned = true;
      if (id === "tiles" && at.near) point(walk(current, at, event.key));
      else if (id === "mask") {
        const down = { ArrowDown: 1, ArrowUp: -1 }[event.key] || 0, right = { ArrowRight: 1, ArrowLeft: -1 }[event.key] || 0;
        point({ i: Math.min(current.nq - 1, Math.max(0, at.i + down)), j: Math.min(current.nk - 1, Math.max(0, at.j + right)) });
      }
    });
  }
  new ResizeObserver(() => {
    fitHatch(el("tiles"), "hatch-tiles");
    fitHatch(el("lens"), "hatch-lens");
    fitHatch(el("figures").querySelector(".bar"), "hatch-bar");
  }).observe(document.querySelector("main"));
}

readData().then((read) => {
  data = read;
  document.body.classList.toggle("single", data.views.length === 1);
  choose({});
  listen();
  document.body.dataset.ready = "yes";
}).catch((error) => {
  el("failure").textContent = error.message;
  el("failure").hidden = false;
  throw error;
});
