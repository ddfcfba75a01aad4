"""``autograder --version``: the versions that grades depend on, and the sandbox in use."""

from __future__ import annotations

from autograder.examination.verdict import versions
from autograder.sandbox.bubblewrap import SandboxUnavailable, probe


def version_text() -> str:
    """Return one line for each; the last names the bubblewrap in use, or why there is none."""
    lines = [f"{name} {version}" for name, version in versions().items()]
    try:
        lines.append(str(probe()))
    except SandboxUnavailable as error:
        lines.append(f"no sandbox: {error}")
    return "\n".join(lines)
