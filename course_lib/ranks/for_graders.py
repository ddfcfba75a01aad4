"""The inner names of `ranks` for code that grades: checks and the autograder.

All other code may import from `ranks` only its public names, `explain`, `costs`, `trace` and the
modules beside them. The rest may change.

- an examiner's fabric, and the rank at its other end: `Fabric` to `lone_rank`
- processes: `ForkServer` to `redirect_output`
- `in_notebook`: whether output goes to a kernel; `Line`: a line that shows progress
"""

from typing import TYPE_CHECKING

from course_lib._later import later

if TYPE_CHECKING:
    from course_lib.ranks.output.printer import in_notebook
    from course_lib.ranks.output.progress import Line
    from course_lib.ranks.processes.fork_client import (
        NEEDED,
        ForkServer,
        ForkServerError,
        end_soon,
        preload,
    )
    from course_lib.ranks.processes.fork_server import collapse, serve
    from course_lib.ranks.processes.worker import redirect_output
    from course_lib.ranks.simulated.fabric import Fabric, Phase
    from course_lib.ranks.simulated.fabric_diagnosis import (
        explain_failure,
        explain_leftovers,
        explain_misuse,
        fabric_states,
    )
    from course_lib.ranks.simulated.lone_rank import lone_rank
    from course_lib.ranks.simulated.operation import NEW_GROUP, Operation, check_operation

# Each part is loaded at its first use. For example, a sandbox is started without a fabric.
__getattr__, __dir__ = later(
    __name__,
    {
        "in_notebook": "output.printer",
        "Line": "output.progress",
        "NEEDED ForkServer ForkServerError end_soon preload": "processes.fork_client",
        "collapse serve": "processes.fork_server",
        "redirect_output": "processes.worker",
        "Fabric Phase": "simulated.fabric",
        "explain_failure explain_leftovers explain_misuse fabric_states": (
            "simulated.fabric_diagnosis"
        ),
        "lone_rank": "simulated.lone_rank",
        "NEW_GROUP Operation check_operation": "simulated.operation",
    },
)
