"""Write the board as a page and as a table of comma-separated values.

Students may write anything as names and notes. The page shows them only as text, and a spreadsheet
never reads them as a formula.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape

from autograder.foreign_text import no_formula, printable
from autograder.leaderboard.entries import TIMED, Entry
from autograder.web_page import STYLE
from course_lib.capstone import DEVICE, LAUNCH, Race

_STYLE = f"""{STYLE}
.name {{ min-width: 12rem; }}
tr.out td {{ color: var(--soft); }}
.bar {{ height: .5rem; background: var(--bar); margin-top: .3rem; }}
.bar div {{ height: 100%; background: var(--light); }}
code, .f {{ font-family: ui-monospace, monospace; }} .wide {{ overflow-x: auto; }}
"""
_HEAD = (
    *(("place", "n"), ("name", "name"), ("score, ms", "n"), ("speed of light, ms", "n")),
    *(("distance", "n"), ("bytes sent", "n"), ("gradients", "n"), ("loss", "n"), ("note", "name")),
)


def page(entries: Sequence[Entry], race: Race, title: str, plays: int) -> str:
    """Return the page: one file that fetches nothing and has no script.

    Args:
        entries: the entries in order, with their places.
        race: the race.
        title: the title of the board.
        plays: number of draws.

    """
    longest = max((entry.seconds for entry in entries if entry.status == TIMED), default=1.0)
    rows = "\n".join(_row(entry, longest) for entry in entries)
    head = "".join(f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in _HEAD)
    empty = "" if entries else "<p>There is no submission yet.</p>"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{_about(race, plays)}</p>
<div class="wide"><table><caption>The score is virtual time: the same on every machine. A bar shows
the score; the left part of the bar shows the speed of light.</caption>
<thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table></div>{empty}
<h2>The speed of light</h2>
<p>No schedule of the same operations and the same bytes takes less than</p>
<p class="f">T = max over ranks k of max(F<sub>k</sub>/φ, S<sub>k</sub>/β, R<sub>k</sub>/β)</p>
<p>F: floating-point operations of the rank, S and R: bytes that it sends and receives,
φ = {DEVICE.flops:.3g} per second, β = {race.bandwidth:.3g} bytes per second. The distance is the
score divided by T. It is above 1 because of launches ({1e6 * LAUNCH:g} µs each), memory traffic,
latency and waiting.</p>
<p>The bytes are those of the rank that sends most. Entries that were disqualified, missed the
target or could not be run stay here, with the reason, but have no place in the order.</p>
</body></html>
"""


def _about(race: Race, plays: int) -> str:
    draws = "another draw" if plays == 1 else f"{plays} other draws"
    return escape(
        f"{race.world_size} ranks, with a latency of {1e6 * race.latency:g} µs and a bandwidth of "
        f"{race.bandwidth / 1e6:g} MB/s between them, train a network of {race.features}, "
        f"{race.hidden} and {race.classes} units until its loss is at most {race.target:g}. The "
        "code of every entry ran on one draw of the problem. The entry was timed on "
        f"{draws}, which its code has not seen."
    )


def _row(entry: Entry, longest: float) -> str:
    timed = entry.status == TIMED
    note = entry.note if timed else f"{entry.status}: {entry.note}"
    bar = ""
    if timed:
        width, light = 100 * entry.seconds / longest, 100 * entry.light / entry.seconds
        bar = (
            f'<div class="bar" aria-hidden="true" style="width:{width:.1f}%">'
            f'<div style="width:{light:.1f}%"></div></div>'
        )
    cells = [(str(entry.place) if timed else "–", "n", ""), (entry.name, "", bar)]
    if entry.seconds > 0:  # otherwise the reason is shown instead of the numbers
        numbers = (
            *(
                f"{1e3 * entry.seconds:.3f}",
                f"{1e3 * entry.light:.3f}",
                f"{entry.distance:.2f} ×" if entry.light else "–",
            ),
            *(f"{entry.sent:,}", str(entry.gradients), f"{entry.loss:.3f}"),
        )
        cells += [(number, "n", "") for number in numbers]
    told = "".join(
        f'<td class="{kind}">{escape(printable(text))}{more}</td>' for text, kind, more in cells
    )
    told += f'<td colspan="{len(_HEAD) - len(cells)}">{escape(printable(note))}</td>'
    return f'<tr class="{"" if timed else "out"}">{told}</tr>'


def table(entries: Sequence[Entry]) -> str:
    """Return the entries as comma-separated values, with the seconds to the last digit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        *(
            [
                *("place", "name", "status", "seconds", "speed_of_light", "distance"),
                *("bytes_sent", "gradients", "loss", "note"),
            ],
        )
    )
    for e in entries:
        has = e.seconds > 0
        numbers = (e.seconds, e.light, round(e.distance, 4), e.sent, e.gradients, e.loss)
        writer.writerow(
            [
                *(e.place or "", no_formula(printable(e.name)), e.status),
                *(numbers if has else [""] * len(numbers)),
                no_formula(printable(e.note)),
            ]
        )
    return out.getvalue()
