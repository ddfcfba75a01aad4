"""Make the seeds of an assignment's submissions, which are secret and the same every time.

One secret per assignment is kept next to the gradebook. The seed of a submission's inputs comes
from this secret and from the submitted code. So grading a class twice uses the same inputs twice. A
student who submits different code gets new inputs, not those that the first report may have shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import threading
from pathlib import Path


def assignment_secret(data: Path, assignment: str) -> str:
    """Return the assignment's secret; the first process that needs it makes it.

    Args:
        data: the folder of the gradebook.
        assignment: its name.

    """
    path = data / "seeds" / assignment
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{assignment}.{os.getpid()}-{threading.get_ident()}.part")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # the first process wins, and the file is always complete
        draft.unlink()
    return path.read_text().strip()


def submission_seed(secret: str, student: str, notebook: str, source_sha256: str) -> str:
    """Return the seed of one notebook of one student, in hexadecimal digits."""
    content = "\0".join((student, notebook, source_sha256))
    return hmac.new(secret.encode(), content.encode(), hashlib.sha256).hexdigest()[:16]
