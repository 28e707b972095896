"""Small charts as SVG text, for `--plot` and the report: no dependency, no script, no network.

A `LineChart` has one x axis (linear or logarithmic) and one y axis from 0; series are drawn as
lines, steps or dots. Colours are told apart by the colour-blind and each series is also named in
the legend. Text is escaped here, and only here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")

_WIDTH, _HEIGHT = 520, 330
"""As wide as half a desktop page, where text has its nominal size; on a phone it has two thirds."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 20, 40, 56
_FONT = 13
_CHARACTER = 7.1  # average width of a legend character at that size


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour. `style` is line, step (a value holds until the next x) or dots.

    `labels`, where given, become the tooltip of each dot.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "line"
    colour: str | None = None
    dashed: bool = False
    labels: Sequence[str] = ()


@dataclass(slots=True)
class LineChart:
    """A chart; `y_percent` prints ratios as per cent. Non-finite points are left out."""

    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    log_x: bool = False
    y_percent: bool = False
    y_top: float | None = None
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Vertical lines with a name."""

    def svg(self) -> str:
        """The chart as one `<svg>` element that scales to the width it is given."""
        xs = [x for s in self.series for x in s.x if self._drawable(x)]
        xs += [x for x, _ in self.marks if self._drawable(x)]
        ys = [y for s in self.series for y in s.y if math.isfinite(y)]
        frame = _Frame(
            low=min(xs, default=1.0),
            high=max(xs, default=10.0),
            top=self.y_top or _round_up(max(ys, default=1.0)),
            log_x=self.log_x,
        )
        legend_rows = self._legend_rows()
        body = [
            f'<text x="{_LEFT}" y="20" class="t">{escape(self.title)}</text>',
            *self._grid(frame),
            *(
                self._mark(frame, x, name, number)
                for number, (x, name) in enumerate(self.marks)
                if self._drawable(x)
            ),
            *(part for i, s in enumerate(self.series) for part in self._draw(frame, s, i)),
            *legend_rows,
        ]
        rows = 1 + max(
            (int(r.split('data-row="')[1].split('"')[0]) for r in legend_rows), default=0
        )
        height = _HEIGHT + 18 * rows
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'aria-label="{escape(self.title)}" font-family="system-ui,sans-serif" '
            f'font-size="{_FONT}"><style>.t{{font-size:15px;font-weight:600}}'
            "text{fill:currentColor}.g{stroke:currentColor;stroke-opacity:.15}"
            ".a{stroke:currentColor;stroke-opacity:.6}</style>" + "".join(body) + "</svg>"
        )

    def _drawable(self, x: float) -> bool:
        return math.isfinite(x) and (x > 0 or not self.log_x)

    def _grid(self, frame: _Frame) -> list[str]:
        left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for value in _linear_ticks(0.0, frame.top, 5):
            y = frame.y(value)
            text = f"{value:.3g}"
            if self.y_percent:
                text = f"{100 * value:.3g} %"
            parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="g"/>')
            parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for value in frame.x_ticks():
            x = frame.x(value)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" class="g"/>'
                f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_short(value)}</text>'
            )
        parts.append(f'<line x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}" class="a"/>')
        parts.append(
            f'<text x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
        )
        parts.append(
            f'<text transform="translate(16 {(_TOP + bottom) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y_label)}</text>'
        )
        return parts

    def _mark(self, frame: _Frame, x: float, name: str, number: int) -> str:
        # each name on a line of its own: marks may stand closer than their names are long
        y = _TOP + 12 + (_FONT + 2) * number
        at = frame.x(x)
        fits = at + 4 + _CHARACTER * len(name) < _WIDTH - _RIGHT
        beside, anchor = (at + 4, "start") if fits else (at - 4, "end")
        return (
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="a" '
            f'stroke-dasharray="2 3"/><text x="{beside:.1f}" y="{y}" '
            f'text-anchor="{anchor}">{escape(name)}</text>'
        )

    def _draw(self, frame: _Frame, series: Series, index: int) -> list[str]:
        colour = series.colour or PALETTE[index % len(PALETTE)]
        points = [
            (frame.x(x), frame.y(y), i)
            for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
            if self._drawable(x) and math.isfinite(y)
        ]
        if series.style == "dots":
            return [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" fill-opacity=".8">'
                f"{_tooltip(series, i)}</circle>"
                for x, y, i in points
            ]
        path = ""
        for number, (x, y, _) in enumerate(points):
            if number == 0:
                path = f"M{x:.1f} {y:.1f}"
            elif series.style == "step":
                path += f"H{x:.1f}V{y:.1f}"
            else:
                path += f"L{x:.1f} {y:.1f}"
        dash = ' stroke-dasharray="6 4"' if series.dashed else ""
        return [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']

    def _legend_rows(self) -> list[str]:
        parts, x, row = [], float(_LEFT), 0
        for index, series in enumerate(self.series):
            width = 26 + _CHARACTER * len(series.name) + 14
            if x + width > _WIDTH - _RIGHT and x > _LEFT:
                x, row = float(_LEFT), row + 1
            colour = series.colour or PALETTE[index % len(PALETTE)]
            y = _HEIGHT + 4 + 18 * row
            parts.append(
                f'<g data-row="{row}"><rect x="{x:.0f}" y="{y - 4}" width="18" height="4" '
                f'fill="{colour}"/><text x="{x + 24:.0f}" y="{y + 3}">{escape(series.name)}</text>'
                "</g>"
            )
            x += width
        return parts


@dataclass(frozen=True, slots=True)
class _Frame:
    """From values to places on the page."""

    low: float
    high: float
    top: float
    log_x: bool

    def x(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log_x:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = min(1.0, value / self.top) if self.top else 0.0
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def x_ticks(self) -> list[float]:
        if not self.log_x:
            return _linear_ticks(self.low, self.high, 6)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1, 2, 5) if last - first <= 3 else (1,)
        ticks = [f * 10.0**e for e in range(first, last + 1) for f in factors]
        return [t for t in ticks if self.low <= t <= self.high]


def _linear_ticks(low: float, high: float, about: int) -> list[float]:
    if high <= low:
        return [low]
    rough = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * f for f in (1, 2, 2.5, 5, 10) if scale * f >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def _round_up(value: float) -> float:
    """The end of an axis that holds `value`: the next tick above it."""
    if value <= 0:
        return 1.0
    ticks = _linear_ticks(0.0, value, 5)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else value
    return step * math.ceil(value / step - 1e-9)


def _short(value: float) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{suffix}"
    return f"{value:.4g}"


def _tooltip(series: Series, index: int) -> str:
    return f"<title>{escape(series.labels[index])}</title>" if series.labels else ""
