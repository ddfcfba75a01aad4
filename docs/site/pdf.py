"""Prints the course as one PDF, from what is committed: ``python docs/site/pdf.py``.

All lectures with their full text, figures as they begin, and answers unfolded. Code that only draws
or imports is left out. Chromium (or Google Chrome) prints; nothing of a notebook is run.
"""

from __future__ import annotations

import argparse
import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from blocks import ROOT, blocks_of, parse_lectures, style_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>From mini-batch SGD to DDP</title><style>{style}</style></head><body>
<header><h1>From mini-batch SGD to DDP</h1><p>The lectures, as they were run. Code that only draws
or imports is left out; the notebooks have it. Notebooks: CC BY 4.0.</p><ol>
{contents}
</ol></header>
{lectures}
</body></html>
"""


def page_of(lectures: list[Path]) -> str:
    """Return all lectures as one page; links between them stay on it."""
    names = {path.stem for path in lectures}
    contents, texts = [], []
    for path in lectures:

        def link(href: str, own: str = path.stem) -> str | None:
            parts = urlsplit(href)
            file = Path(unquote(parts.path)) if parts.path else Path(f"{own}.ipynb")
            if file.suffix != ".ipynb" or file.stem not in names or str(file.parent) != ".":
                return None
            return f"#{quote(f'{file.stem}/{unquote(parts.fragment)}')}"

        told = f'<article id="{path.stem}/">'
        for block in blocks_of(path, link, f"{path.stem}/"):
            if block.kind == "heading":
                place = html.escape(block.place, quote=True)
                number = f"{path.stem[:2]} · " if block.level == 1 else ""
                tag = f"h{block.level}"
                told += f'\n<{tag} id="{place}">{number}{block.html}</{tag}>'
                if number:
                    row = f'<li><a href="#{path.stem}/">{number}{block.html}</a></li>'
                    contents.append(row)
            else:
                shown = block.html.replace("<details", "<details open")
                told += f'\n<div class="block {block.kind}">{shown}</div>'
        texts.append(f"{told}</article>")
    return PAGE.format(
        style=style_of("print.css"),
        contents="\n".join(contents),
        lectures="\n".join(texts),
    )


def print_page(browser: str, page: str, to: Path) -> str:
    """Let a browser print a page; return what went wrong, or nothing."""
    with tempfile.TemporaryDirectory(prefix="course-pdf-", ignore_cleanup_errors=True) as folder:
        source, made = Path(folder, "course.html"), Path(folder, "course.pdf")
        source.write_text(page, encoding="utf-8")
        options = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses root otherwise
        options += [f"--user-data-dir={folder}/profile", "--no-pdf-header-footer"]
        options += ["--generate-pdf-document-outline", f"--print-to-pdf={made}", source.as_uri()]
        try:
            done = subprocess.run(
                [browser, *options], capture_output=True, text=True, timeout=900, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if not made.is_file():
            return done.stderr[-2000:] or f"the browser ended with status {done.returncode}"
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, to)
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, and print all lectures or those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT / "_site" / "course.pdf",
        help="the file (default: _site/course.pdf)",
    )
    parser.add_argument(
        "--browser", help=f"the browser that prints (default: one of {', '.join(BROWSERS)})"
    )
    given = parse_lectures(parser, arguments)
    wanted = [given.browser] if given.browser else BROWSERS
    browser = next((program for name in wanted if (program := shutil.which(name))), None)
    if browser is None:
        print(
            f"pdf.py: there is no {' and no '.join(wanted)} here to print the PDF. Install "
            "Chromium (on Debian: apt install chromium), or name a browser like it: --browser NAME",
            file=sys.stderr,
        )
        return 1
    print(f"1/2 the pages of {len(given.lectures)} lectures ...", flush=True)
    page = page_of(given.lectures)
    print(f"2/2 {Path(browser).name} prints them: up to a minute ...", flush=True)
    if wrong := print_page(browser, page, given.to.resolve()):
        print(f"pdf.py: {browser} did not print the course: {wrong}", file=sys.stderr)
        return 1
    print(f"{given.to.stat().st_size / 1e6:.1f} MB; open {given.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
