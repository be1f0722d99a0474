"""The explorer as one page of HTML that opens from disk: data, style and scripts are in it."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tessera_cupy.cost import find_gpu
from tessera_cupy.errors import wrong
from tessera_cupy.explore.choices import SENTENCES, BlockSize, block_sizes
from tessera_cupy.explore.data import mappings_of, scene_data, tiles_of, view_of
from tessera_cupy.explore.plans import AUTO
from tessera_cupy.explore.scene import Scene, make_scene
from tessera_cupy.masks import KeySlices
from tessera_cupy.viz import style

#: What a page has unless it is told otherwise; of GPUs one of each generation.
MODELS = ("wan-14b-81f-720p", "hunyuan-117f-768p", "cogvideox-5b-49f-480p")
RULES = ("spade", "vsa", "radial", "svg", "fg-attn")
GPUS = ("H200", "A100-SXM4-80GB", "RTX 4090", "B200", "RTX 5090")
HEADS = (0, 1)

_SLICES_AS_BLOCKS = "retain-pack"

_FILES = Path(__file__).parent / "page_files"
_SCRIPTS = ("data.js", "pictures.js", "pointer.js", "main.js")


def explorer_page(
    *,
    models: Sequence[str] = MODELS,
    rules: Sequence[str] = RULES,
    heads: Sequence[int] = HEADS,
    gpus: Sequence[str] = GPUS,
    on_scene: Callable[[int, int], None] | None = None,
) -> str:
    """One self-contained page with every combination: masks, their tiles, predicted times.

    Args:
        models: names in :data:`tessera_cupy.video.MODELS`, whose grids are cut down.
        rules: names in :data:`tessera_cupy.bench.rules.RULES`, each with all of its block sizes and
            mappings; of slices, those that gather and ``"retain-pack"``.
        heads: numbers of heads.
        gpus: names in :data:`tessera_cupy.cost.GPUS`.
        on_scene: called with (done, total) after each mask.

    Returns:
        HTML that loads nothing, for a browser of 2023 or later.

    Raises:
        ValueError: a name that there is not, or none at all.
        MissingExtraError: a package that a rule needs is not installed.
    """
    for name, given in (("models", models), ("rules", rules), ("heads", heads), ("gpus", gpus)):
        if not given:
            raise ValueError(wrong(name, "at least one", "none", "leave it out for the usual ones"))
    for gpu in gpus:
        find_gpu(gpu)
    wanted = [
        (model, rule, head, size)
        for model in models
        for rule in rules
        for head in heads
        for size in block_sizes(rule) or (None,)
    ]
    return _html(_packed(_views(wanted, gpus, on_scene)))


def view_page(data: dict[str, Any]) -> str:
    """One view alone, without controls: the same pictures, for a notebook.

    Args:
        data: of :func:`tessera_cupy.explore.explore_data` or ``explore_mask``.
    """
    return _html(_packed([data]))


def _views(
    wanted: Sequence[tuple[str, str, int, BlockSize | None]],
    gpus: Sequence[str],
    on_scene: Callable[[int, int], None] | None,
) -> Iterable[dict[str, Any]]:
    for done, (model, rule, head, size) in enumerate(wanted, start=1):
        scene = make_scene(model, rule, head, size)
        shown = scene_data(scene)
        layouts: dict[Any, dict[str, Any]] = {}
        for gpu in gpus:
            for mapping, plan in mappings_of(scene, gpu).items():
                if _left_out(scene, mapping):
                    continue
                # GPUs with equal tiles share them.
                spec = plan.spec
                key = (spec.mapping, spec.tile_q, spec.tile_kv, plan.config.rows_together)
                if key not in layouts:
                    layouts[key] = tiles_of(plan)
                yield view_of(shown, layouts[key], plan, gpu, mapping)
        if on_scene is not None:
            on_scene(done, len(wanted))


def _left_out(scene: Scene, mapping: str) -> bool:
    """Of slices, whose lists are long, plans that gather are shown, and one of blocks beside."""
    if not isinstance(scene.mask, KeySlices):
        return False
    return mapping not in (AUTO, _SLICES_AS_BLOCKS) and not mapping.endswith("-gather")


def _packed(views: Iterable[dict[str, Any]]) -> str:
    """Views as base64 of deflated JSON; what several have in common is there once."""
    seen: dict[str, dict[str, int]] = {"scenes": {}, "layouts": {}, "plans": {}}

    def index(kind: str, part: Any) -> int:
        key = json.dumps(part, separators=(",", ":"))
        return seen[kind].setdefault(key, len(seen[kind]))

    listed = [
        {
            "scene": index("scenes", view["scene"]),
            "layout": index("layouts", view["tiles"]),
            "plan": index("plans", {k: v for k, v in view["plan"].items() if k != "asked"}),
            "asked": view["plan"]["asked"],
            "gpu": view["gpu"],
            "figures": view["figures"],
        }
        for view in views
    ]
    parts = [f'"{kind}":[{",".join(texts)}]' for kind, texts in seen.items()]
    parts.append(f'"views":{json.dumps(listed, separators=(",", ":"))}')
    parts.append(f'"sentences":{json.dumps(dict(SENTENCES))}')
    text = "{" + ",".join(parts) + "}"
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _html(data: str) -> str:
    page = (_FILES / "explorer.html").read_text(encoding="utf-8")
    css = (_FILES / "explorer.css").read_text(encoding="utf-8")
    script = "\n".join((_FILES / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    for place, text in (("STYLE", _palette() + css), ("SCRIPT", script), ("DATA", data)):
        page = page.replace(f"/*{place}*/", text)
    return page


def _palette() -> str:
    """The colours of :mod:`tessera_cupy.viz` as variables of CSS."""
    colours = {
        "style-kept": style.KEPT,
        "style-partial": style.PARTIAL,
        "style-frame": style.FRAME,
        "style-ink": style.INK,
        "style-paper": style.PAPER,
        **{f"step-{i}": colour for i, colour in enumerate(style.STEP_COLOURS)},
    }
    return ":root {" + "".join(f"--{name}: {value};" for name, value in colours.items()) + "}\n"
