"""The boxes in which a notebook shows reports and questions, and their marks."""

from __future__ import annotations

from pathlib import Path

# The selectors begin with an element. Otherwise JupyterLab's own rules for output would win.
_STYLE = Path(__file__).with_name("box.css").read_text(encoding="utf-8")


def box(kind: str, body: str) -> str:
    """Return HTML as a box of this kind: ``report`` or ``guess``."""
    # Two of the classes prevent a dollar sign from being read as the start of a formula.
    classes = f"course-box course-{kind} tex2jax_ignore mathjax_ignore"
    return f'<style>{_STYLE}</style><div class="{classes}">{body}</div>'


def mark(good: bool) -> str:
    """Return a tick or a cross."""
    return f'<span class="{"good" if good else "bad"}">{"✓" if good else "✗"}</span>'
