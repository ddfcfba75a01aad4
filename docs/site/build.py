"""Builds the course as web pages, from what is committed: ``python docs/site/build.py``.

Nothing of a notebook is run, and nothing is fetched. Every link between the pages is followed; a
link that leads nowhere, or a warning of Sphinx, ends the build with status 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from course_lib import READING_ORDER

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIRST = f"{HERE.relative_to(ROOT).as_posix()}/index.html"
BESIDE = ("data", "ranks", "checking", "learner", "train", "running_model", "simulate", "figures")
API = """# API reference

The reference implementations in the order in which they are read, then what stands beside
them. Each module's source is one click away.

```{{eval-rst}}
.. autosummary::
   :toctree: api
   :nosignatures:

   {modules}
```
"""
HOME = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={first}"><title>From mini-batch SGD to DDP</title></head>
<body><a href="{first}">From mini-batch SGD to DDP</a></body></html>
"""


class _Page(HTMLParser):
    """Collects a page's links, the places that can be linked to, and what it fetches."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an opening tag."""
        given = dict(attrs)
        self.places |= {str(given[name]) for name in ("id", "name") if given.get(name)}
        links = [link for name in ("href", "src") if (link := given.get(name)) is not None]
        if tag != "base":
            self.links += links
        shown = given.get("rel") in ("stylesheet", "preload", "modulepreload")
        if tag in ("script", "img", "iframe") or (tag == "link" and shown):
            self.fetched |= {link for link in links if urlsplit(link).netloc}


def what_is_wrong(site: Path) -> list[str]:
    """Return a line for each link to no file or no place of the site, and each file from elsewhere.

    Pages must not fetch scripts, styles or images from the network.
    """
    pages = {path.resolve(): _Page(path) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        wrong += [f"a page needs a file from the network: {each}" for each in page.fetched]
        if path.is_relative_to((site / "_static").resolve()):  # the theme's own templates
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = path.parent.joinpath(unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            lost = place and target in pages and place not in pages[target].places
            if (not target.is_file() or lost) and link != "builtins.html":  # Sphinx's slip
                wrong.append(f"broken link: {path.relative_to(site.resolve())}: {link}")
    return wrong


def write_api() -> None:
    """Write the page that lists the modules; their own pages are Sphinx's work."""
    names = (*READING_ORDER, *BESIDE)
    modules = "\n   ".join(f"course_lib.{name}" for name in names)
    (HERE / "api.md").write_text(API.format(modules=modules), encoding="utf-8")


def build(site: Path) -> int:
    """Build the pages into `site` and look at their links; return the exit status."""
    print("1/2 pages of notebooks, texts and modules: one or two minutes ...", flush=True)
    for folder in (HERE / "api", site / "_modules"):  # where modules that are gone would stay
        shutil.rmtree(folder, ignore_errors=True)
    write_api()
    # In one process: with several, the module of a name depends on which process reads first.
    sphinx = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going"]
    sphinx += [] if sys.stdout.isatty() else ["-q"]  # in a terminal, each page is named in turn
    status = subprocess.run(
        [*sphinx, "-c", str(HERE), str(ROOT), str(site)], check=False
    ).returncode
    if status:
        return status
    (site / "index.html").write_text(HOME.format(first=FIRST), encoding="utf-8")
    (site / ".nojekyll").touch()  # or GitHub leaves out folders that begin with an underscore
    print("2/2 testing every link ...", flush=True)
    wrong = what_is_wrong(site)
    for each in wrong:
        print(each, file=sys.stderr)
    if not wrong:
        pages = len(list(site.rglob("*.html")))
        print(f"{pages} pages; open {site / 'index.html'}")
    return int(bool(wrong))


def main() -> int:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT / "_site" / "html",
        help="folder of the pages (default: _site/html)",
    )
    return build(parser.parse_args().to.resolve())


if __name__ == "__main__":
    sys.exit(main())
