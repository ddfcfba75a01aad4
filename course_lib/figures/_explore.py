"""A figure with sliders: one drawing for each combination of the sliders' values.

    explore(draw, describe, K=[2, 4, 8], step=range(7), alt="Chunks travel round the ring.")

All drawings are made in advance, by the same function, and the page holds all of them. So Python
computes every number in them, and the page needs neither a kernel nor the network. The program in
the page, ``explore.js``, only selects a drawing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.figures._shown import Described

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

_PROGRAM = Path(__file__).with_name("explore.js")
_TIP = "tip: "
# Each text lists all its possible fonts: matplotlib's ten names would be half of a drawing.
_FONTS = ["DejaVu Sans", "Verdana", "sans-serif"]
_HATCH = re.compile(r"<pattern.*?</pattern>", re.DOTALL)
# The selectors begin with an element name. Otherwise JupyterLab's own rules for output would win.
_STYLE = """<style>
div.course-explore { color: var(--jp-content-font-color1, var(--pst-color-text-base, inherit));
  font: 13px/1.5 var(--jp-content-font-family, system-ui, sans-serif); }
div.course-explore svg, div.course-explore img { background: white; display: block; height: auto;
  max-width: 100%; }
div.course-explore .bar { align-items: center; display: flex; gap: .7em; max-width: 46em; }
div.course-explore .bar > span { flex: 0 0 auto; min-width: 9em; }
div.course-explore input { accent-color: #0072b2; flex: 1; margin: 0; min-width: 6em; }
div.course-explore select { font: inherit; }
div.course-explore output { font-weight: bold; min-width: 10em; }
div.course-explore button { background: none; border: 1px solid #8888; border-radius: 4px;
  color: inherit; cursor: pointer; font: inherit; min-width: 4.5em; padding: .05em .6em; }
div.course-explore :focus-visible { outline: 2px solid #4a90d9; outline-offset: 1px; }
div.course-explore .words { margin: .2em 0 .5em; min-height: 3em; }
div.course-explore .all { max-height: 20em; overflow: auto; }
@media (max-width: 40em) { div.course-explore .bar { flex-wrap: wrap; gap: 0 .7em; } }
</style>"""


def explore(
    draw: Callable[..., Figure],
    describe: Callable[..., str],
    *,
    alt: str,
    first: dict[str, Any] | None = None,
    play: str | None = None,
    **parameters: Iterable[Any],
) -> Described:
    """Return a figure with sliders, for a notebook to display.

    Viewers that do not run the program, such as GitHub and a notebook that is not trusted, show the
    first drawing. Below it is a folded table with the words for all drawings. A slider ends where
    the drawings no longer change: for values without a meaning, let `draw` return the same figure
    again.

    Args:
        draw: makes the figure for one value of each parameter, given by keyword. All figures have
            the same size.
        describe: returns a sentence, with numbers, about what the figure for these values shows.
        alt: a sentence that says what changes when the sliders are moved.
        first: the values that are shown first; by default the first value of each parameter.
        play: the parameter that a button plays, as a film.
        **parameters: the name of a slider → the values on it, shown as texts. Values that are
            names, not quantities, are a list to choose from. An underscore in a name is shown as a
            space.

    Raises:
        ValueError: `first` or `play` names a parameter or value that does not exist.

    """
    import matplotlib.pyplot as plt

    values = {name: list(choices) for name, choices in parameters.items()}
    start = {name: choices[0] for name, choices in values.items()} | (first or {})
    combinations = [
        dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())
    ]
    figures = []
    for combination in combinations:
        figures.append(draw(**combination))
        plt.close(figures[-1])  # otherwise pyplot would warn of too many open figures
    sentences = [" ".join(describe(**combination).split()) for combination in combinations]
    texts = {name: [str(value) for value in choices] for name, choices in values.items()}
    drawings, still = _drawn(figures, combinations.index(start))
    # Hatches are long, and the same in all drawings, so the page holds them once.
    hatches = dict.fromkeys(hatch for drawing in drawings for hatch in _HATCH.findall(drawing))
    drawings = [_HATCH.sub("", drawing) for drawing in drawings]
    packed = zlib.compress(json.dumps(["".join(hatches), *drawings]).encode(), 9)
    data = {
        "sliders": [
            {"name": name.replace("_", " "), "choice": _is_choice(choices), "values": choices}
            for name, choices in texts.items()
        ],
        "at": [choices.index(start[name]) for name, choices in values.items()],
        "play": -1 if play is None else list(values).index(play),
        "words": sentences,
        "drawings": base64.b64encode(packed).decode("ascii"),
    }
    image = base64.b64encode(still).decode("ascii")
    alt = " ".join(alt.split())
    page = _element(data, image, alt)
    return Described({"text/html": page, "image/png": image, "text/plain": alt})


def tip(artist: Artist, text: str) -> None:
    """Show `text` when the pointer rests on this part of a drawing, in `explore`."""
    artist.set_gid(_TIP + text)


def _is_choice(texts: list[str]) -> bool:
    """Return whether these are names to choose from, and no quantities to slide along."""
    return not all(re.match(r"[-−+]?[\d.∞]", text) for text in texts)


def _drawn(figures: list[Figure], place: int) -> tuple[list[str], bytes]:
    """Return all figures as SVGs with the same frame, and the figure at `place` as a PNG."""
    import matplotlib
    from matplotlib.transforms import Bbox

    from course_lib.ranks.trace.figure import png_of

    still = png_of(figures[place])
    # All have one frame, large enough for each, so that nothing jumps and nothing is cut off.
    drawn = dict.fromkeys(figures, "")  # a figure that is used several times is drawn once
    frame = Bbox.union([figure.get_tightbbox() for figure in drawn]).padded(0.05)
    # Text stays text: a screen reader can read it, and it is a tenth as long as its outlines.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "course", "font.sans-serif": _FONTS}
    with matplotlib.rc_context(settings):
        for figure in drawn:
            file = io.StringIO()
            figure.savefig(file, format="svg", bbox_inches=frame, metadata={"Date": None})
            drawn[figure] = _tidy(file.getvalue())
    return [drawn[figure] for figure in figures], still


def _tidy(svg: str) -> str:
    """Return only the SVG element with its tips, without the parts that only a file needs."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r'<g id="\w+_\d+">', "<g>", svg)
    # A hundredth of a point cannot be seen, so coordinates (but not texts) are rounded to it.
    svg = re.sub(r' (?:d|x|y|points|transform)="[^"]*"', _short, svg)
    return re.sub(r"\n\s*", "\n", svg)


def _short(attribute: re.Match[str]) -> str:
    numbers = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}", attribute[0])
    return re.sub(r"\s*\n", "", numbers)


def _element(data: dict[str, Any], image: str, alt: str) -> str:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    name = f"course-explore-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    label = html.escape(alt, quote=True)
    rows = itertools.product(*(slider["values"] for slider in data["sliders"]))
    heads = "".join(f"<th>{html.escape(slider['name'])}</th>" for slider in data["sliders"])
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(value)}</td>' for value in row)}"
        f"<td>{html.escape(sentence)}</td></tr>"
        for row, sentence in zip(rows, data["words"], strict=True)
    )
    start = f'for (const root of document.querySelectorAll("div.{name}:not([data-runs])")) '
    start += '{ root.dataset.runs = "yes"; mount(root, data); }'
    return (
        f'{_STYLE}<div class="course-explore {name} tex2jax_ignore mathjax_ignore" role="group" '
        f'aria-label="{label}">'
        f'<img alt="{label}" src="data:image/png;base64,{image}">'
        f'<details><summary>All of it in words</summary><div class="all"><table>'
        f"<tr>{heads}<th></th></tr>{body}</table></div></details></div>"
        f'<script type="module">{_PROGRAM.read_text(encoding="utf-8")}\n'
        f"const data = {text};\n{start}</script>"
    )
