"""A late policy: take off a share of the points for each day begun, after some free days.

In ``nbgrader_config.py``::

    c.AssignLatePenalties.plugin_class = "autograder.late_policy.PerDay"
    c.PerDay.share = 0.1
    c.PerDay.free_days = 1
    c.PerDay.grace_minutes = 5
    c.PerDay.largest = 0.5
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
    grace_minutes = Integer(0, min=0, help="Minutes of each day late that do not count.").tag(
        config=True
    )
    largest = Float(1.0, min=0.0, max=1.0, help="Largest share of the points taken off.").tag(
        config=True
    )

    def late_submission_penalty(
        self, student_id: str, score: float, total_seconds_late: float
    ) -> float | None:
        """Return the points to take off: share × score × (days begun − free days), at most largest.

        A day begins when its minutes of grace are over.
        """
        days = math.ceil((total_seconds_late - 60 * self.grace_minutes) / _DAY) - self.free_days
        return min(self.largest, self.share * days) * score if days > 0 else None
