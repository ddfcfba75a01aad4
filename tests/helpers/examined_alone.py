"""Examine one function in a process of its own, and report the cost for the examiner.

python -m tests.helpers.examined_alone 4 < cells.py      # its cells, between lines of ---
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch

from autograder.examination.submission import Submission, examine
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking import Case, Check, Wrong


def judge(case: Case, inputs: Any, outputs: Any) -> None:
    """Accept nothing: a bomb is no answer."""
    raise Wrong("it came back")


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Print the result as JSON."""
    check = Check(
        "f",
        lambda function, mine: function(mine),
        lambda case, generator: [torch.ones(3)] * case.world_size,
        judge,
        (Case("a case", int(sys.argv[1])),),
        seconds=30.0,  # a busy machine needs some of them until a limit is met
    )
    with Sandbox(()) as place:
        place.warm()
        with Submission(place) as submission:
            # Memory for torch's first use does not belong to the bomb.
            examine("t/f", check, submission, seed="s")
            before, processor, start = peak(), time.process_time(), time.monotonic()
            outcomes = [submission.run_cell(cell) for cell in sys.stdin.read().split("\n---\n")]
            report = examine("t/f", check, submission, seed="s")
    (result,) = report.results
    written = len(str(report)) + len(result.detail) + sum(len(str(each)) for each in outcomes)
    cost = {
        "reason": result.reason,
        "written": written,
        "memory": peak() - before,
        "processor": time.process_time() - processor,
        "seconds": time.monotonic() - start,
    }
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
