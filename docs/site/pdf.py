"""Prints the course as one PDF, from what is committed: ``python docs/site/pdf.py``.

All lectures with their full text, figures as they begin, and answers unfolded. Sphinx writes one
page, and Chromium (or Google Chrome) prints it; nothing of a notebook is run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def write_page(folder: Path, lectures: str) -> Path:
    """Let Sphinx write the lectures, a pattern of files below the root, as one page; return it.

    The page has no programs, so figures stay as they begin, and all that is folded is open. Raises
    CalledProcessError if Sphinx fails.
    """
    patterns = f"docs/site/paper/index.rst,{lectures}"
    sphinx = [sys.executable, "-m", "sphinx", "-b", "singlehtml", "-q", "-c", str(HERE / "paper")]
    sphinx += ["-D", f"include_patterns={patterns}"]
    subprocess.run([*sphinx, str(ROOT), str(folder)], check=True)
    made, page = folder / "docs/site/paper/index.html", folder / "course.html"
    text = re.sub("<script.*?</script>", "", made.read_text(encoding="utf-8"), flags=re.DOTALL)
    # Sphinx writes the page's links as if it stood at the top.
    page.write_text(text.replace("<details", "<details open"), encoding="utf-8")
    return page


def print_page(browser: str, page: Path, to: Path) -> None:
    """Let a browser print a page; raise OSError if it does not."""
    made = page.with_suffix(".pdf")
    options = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses root otherwise
    options += [f"--user-data-dir={page.parent}/profile", "--no-pdf-header-footer"]
    options += ["--generate-pdf-document-outline", f"--print-to-pdf={made}", page.as_uri()]
    subprocess.run([browser, *options], timeout=900, check=False)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made, to)


def main() -> None:
    """Parse the command line, and print the lectures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "lectures", nargs="?", default="lectures/*.ipynb", help="pattern (default: %(default)s)"
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT / "_site" / "course.pdf",
        help="the file (default: _site/course.pdf)",
    )
    given = parser.parse_args()
    browser = next((program for name in BROWSERS if (program := shutil.which(name))), None)
    if browser is None:
        parser.error("printing needs Chromium or Google Chrome (on Debian: apt install chromium)")
    with tempfile.TemporaryDirectory(prefix="course-pdf-", ignore_cleanup_errors=True) as folder:
        print("1/2 the pages of the lectures: up to a minute ...", flush=True)
        page = write_page(Path(folder), given.lectures)
        print(f"2/2 {Path(browser).name} prints them: up to a minute ...", flush=True)
        print_page(browser, page, given.to.resolve())
    print(f"{given.to.stat().st_size / 1e6:.1f} MB; open {given.to}")


if __name__ == "__main__":
    main()
