"""The curves of a run: one picture, drawn from its metrics.jsonl."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gspo_jax.metrics import read_metrics

Lines = Sequence[dict]

_BLUE, _ORANGE, _GREEN, _GRAY = "#3366aa", "#dd7733", "#449966", "#777777"
_HELDOUT = "heldout/"


def plot_curves(workdir: str | Path) -> Path:
    """Draws `<workdir>/curves.png` from `<workdir>/metrics.jsonl` and returns its path.

    Any key may be absent, from the whole file or from some lines; its panel says so.
    """
    workdir = Path(workdir)
    lines = read_metrics(workdir / "metrics.jsonl")
    panels: list[tuple[str, str, Callable[[Axes, Lines], None]]] = [
        ("Reward", "mean per response", _series(reward="")),
        ("Held-out score", "share with full marks", _heldout),
        ("Clipped sequences", "fraction", _series(clip_low="below", clip_high="above")),
        ("Sequence ratio", "π/π_old, length-normalised", _ratio),
        ("Response length", "tokens", _series(response_length="")),
        ("Truncated responses", "fraction", _series(truncated="")),
        ("Entropy", "nats per token", _series(entropy="")),
        (
            "Experts changed",
            "fraction of choices",
            _series(expert_change_1="after one update", expert_change_last="in the last minibatch"),
        ),
        ("Gradient norm", "before clipping", _series(grad_norm="")),
    ]
    figure = Figure(figsize=(13, 10), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    last = max((line["step"] for line in lines), default=0)
    title = f"{workdir.absolute().name} · to step {last}"
    figure.suptitle(title, fontsize=15, fontweight="bold")
    for axes, (title, unit, draw) in zip(figure.subplots(3, 3).flat, panels, strict=True):
        draw(axes, lines)
        axes.set_title(title, fontsize=12)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        margin = 0.03 * max(last, 1)
        axes.set_xlim(-margin, max(last, 1) + margin)
        if not axes.has_data():
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=_GRAY)
            axes.set(xticks=[], yticks=[])
        elif axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=9, framealpha=0.8)
    path = workdir / "curves.png"
    figure.savefig(path, dpi=110)
    return path


def _points(lines: Lines, key: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of a key."""
    found = [(line["step"], line[key]) for line in lines if math.isfinite(line.get(key, math.nan))]
    return [step for step, _ in found], [value for _, value in found]


def _curve(axes: Axes, lines: Lines, key: str, color: str | None, label: str = "") -> None:
    steps, values = _points(lines, key)
    if steps:
        # Few points are marked, else a single one would be invisible.
        marker = "o" if len(steps) <= 40 else ""
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3.5, lw=1.5)


def _series(**labels: str) -> Callable[[Axes, Lines], None]:
    """A panel of one curve per key, each with its label (empty: none)."""

    def draw(axes: Axes, lines: Lines) -> None:
        for (key, label), color in zip(labels.items(), (_BLUE, _ORANGE), strict=False):
            _curve(axes, lines, key, color, label)

    return draw


def _heldout(axes: Axes, lines: Lines) -> None:
    keys = {key for line in lines for key in line if key.startswith(_HELDOUT)}
    for key in sorted(key for key in keys if key.rpartition("/")[2].startswith("avg")):
        _curve(axes, lines, key, None, key.removeprefix(_HELDOUT))
    if axes.has_data():
        axes.set_ylim(0, 1)


def _ratio(axes: Axes, lines: Lines) -> None:
    _curve(axes, lines, "ratio_max", _ORANGE, "max")
    _curve(axes, lines, "ratio", _BLUE, "mean")
    _curve(axes, lines, "ratio_min", _GREEN, "min")
    if axes.has_data():
        axes.axhline(1, color=_GRAY, lw=0.8, ls="--")
    axes.ticklabel_format(axis="y", useOffset=False)
