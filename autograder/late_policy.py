"""A late policy: take off a share of the points for each day begun, after some free days.

In ``nbgrader_config.py``::

    c.AssignLatePenalties.plugin_class = "autograder.late_policy.PerDay"
    c.PerDay.share = 0.1
    c.PerDay.free_days = 1
"""

from __future__ import annotations

import math

from nbgrader.plugins import BasePlugin
from traitlets import Float, Integer

_DAY = 24 * 3600


class PerDay(BasePlugin):
    """nbgrader's plugin: `late_submission_penalty` is called for each late notebook."""

    share = Float(0.1, min=0.0, max=1.0, help="Share of the points taken off for each day.").tag(
        config=True
    )
    free_days = Integer(
        0, min=0, help="Days that a notebook may be late without losing points."
    ).tag(config=True)

    def late_submission_penalty(
        self, student_id: str, score: float, total_seconds_late: float
    ) -> float | None:
        """Return the points to take off: share × score × (days begun − free days), at most all."""
        days = math.ceil(total_seconds_late / _DAY) - self.free_days
        return min(score, self.share * score * days) if days > 0 else None
