"""The explorer in Jupyter: controls of ipywidgets around the page's own pictures."""

from __future__ import annotations

import html
from importlib.util import find_spec
from typing import Any

from tessera_cupy.bench.rules import RULES
from tessera_cupy.cost import GPUS
from tessera_cupy.errors import MissingExtraError, wrong
from tessera_cupy.explore.choices import BlockSize, block_sizes, model_of, rule_title, small_grid
from tessera_cupy.explore.data import GPU, MODEL, RULE, mappings_of, scene_data, tiles_of, view_of
from tessera_cupy.explore.page import view_page
from tessera_cupy.explore.plans import AUTO
from tessera_cupy.explore.scene import make_scene
from tessera_cupy.video import MODELS

_HEIGHT = 1080


def widget(model: str = MODEL, rule: str = RULE, gpu: str = GPU) -> Any:
    """Controls for grid, rule, head, block size, mapping and GPU, and the pictures below.

    Every model, rule and GPU can be chosen, and every head of the model; what is chosen is computed
    then. Needs the extra ``notebooks``.

    Args:
        model: what to begin with, a name in :data:`tessera_cupy.video.MODELS`.
        rule: likewise, in :data:`tessera_cupy.bench.rules.RULES`.
        gpu: likewise, in :data:`tessera_cupy.cost.GPUS`.

    Returns:
        An ``ipywidgets.VBox``; the last value of a cell, or ``display`` it. Its ``controls`` are
        the widgets by name, and its ``picture`` has the page.

    Raises:
        MissingExtraError: ipywidgets is not installed.
        ValueError: a name that there is not.

    Example:
        ::

            from tessera_cupy import explore

            explore.widget(rule="vsa")
    """
    if find_spec("ipywidgets") is None:
        raise MissingExtraError(
            "The widget needs ipywidgets, which has its controls, and it is not installed. "
            "Fix: pip install ipywidgets (the extra `notebooks` has all that it needs)."
        )
    return _Explorer(model, rule, gpu).box


class _Explorer:
    """The widgets, and what happens when one of them changes."""

    def __init__(self, model: str, rule: str, gpu: str) -> None:
        import ipywidgets

        def dropdown(name: str, options: list[tuple[str, Any]], value: Any) -> Any:
            return ipywidgets.Dropdown(
                options=options,
                value=value,
                description=name,
                style={"description_width": "80px"},
            )

        grids = [(f"{name} ({small_grid(name)})", name) for name in MODELS]
        self.controls = {
            "model": dropdown("model grid", grids, _known(model, MODELS, "model")),
            "rule": dropdown(
                "rule", [(rule_title(name), name) for name in RULES], _known(rule, RULES, "rule")
            ),
            "head": ipywidgets.BoundedIntText(
                0, min=0, description="head", style={"description_width": "80px"}
            ),
            "block_size": dropdown("block size", [("the rule's", None)], None),
            "mapping": dropdown("mapping", [(AUTO, AUTO)], AUTO),
            "gpu": dropdown("GPU", [(name, name) for name in GPUS], _known(gpu, GPUS, "gpu")),
        }
        self.picture = ipywidgets.HTML(layout={"width": "100%"})
        rows = ipywidgets.GridBox(
            list(self.controls.values()),
            layout={"grid_template_columns": "repeat(3, minmax(0, 1fr))"},
        )
        self.box = ipywidgets.VBox([rows, self.picture])
        self.box.controls, self.box.picture = self.controls, self.picture
        self._quiet = False
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self._draw()

    def _changed(self, change: Any) -> None:
        # Controls that follow from another change on their own; the picture is drawn once.
        if not self._quiet:
            self._draw()

    def _draw(self) -> None:
        self._quiet = True
        try:
            self.controls["head"].max = model_of(self._value("model")).heads - 1
            self._offer("block_size", _block_options(self._value("rule")))
            scene, message = None, ""
            try:
                scene = make_scene(
                    self._value("model"),
                    self._value("rule"),
                    self._value("head"),
                    self._value("block_size"),
                )
            except MissingExtraError as error:
                message = str(error)
            if scene is None:
                self.picture.value = f"<p>{html.escape(message)}</p>"
                return
            plans = mappings_of(scene, self._value("gpu"))
            options = [(f"{AUTO}: {plans[AUTO].spec.mapping.name}", AUTO)]
            options += [(name, name) for name in plans if name != AUTO]
            self._offer("mapping", options)
            mapping = self._value("mapping")
            plan = plans[mapping]
            data = view_of(scene_data(scene), tiles_of(plan), plan, self._value("gpu"), mapping)
            self.picture.value = _frame(view_page(data))
        finally:
            self._quiet = False

    def _value(self, name: str) -> Any:
        return self.controls[name].value

    def _offer(self, name: str, options: list[tuple[str, Any]]) -> None:
        """New options of a control, which keeps its value if that is still one of them."""
        control = self.controls[name]
        if list(control.options) == options:
            return
        kept = control.value
        control.options = options
        values = [value for _, value in options]
        control.value = kept if kept in values else values[0]


def _block_options(rule: str) -> list[tuple[str, BlockSize | None]]:
    known = block_sizes(rule)
    if not known:
        return [("the rule's", None)]
    return [(f"{q}x{kv}", (q, kv)) for q, kv in known]


def _known(name: str, names: Any, argument: str) -> str:
    if name not in names:
        raise ValueError(wrong(argument, f"one of {', '.join(names)}", repr(name), "pick one"))
    return name


def _frame(page: str) -> str:
    """A page in a frame of its own, where its scripts run and its style stays."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: {_HEIGHT}px; '
        f'border: 0" title="From a mask to physical tiles"></iframe>'
    )
