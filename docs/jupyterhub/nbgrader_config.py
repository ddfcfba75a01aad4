"""nbgrader's configuration for everybody on the hub; ``jupyterhub_config.py`` names this folder."""

import os

c = get_config()  # noqa: F821  (nbgrader provides it)

c.CourseDirectory.course_id = "sgd-to-ddp"
c.Exchange.root = os.environ["EXCHANGE"]
if "STUDENT" in os.environ:  # not in the graders' server, which is about all students
    c.CourseDirectory.student_id = os.environ["STUDENT"]
