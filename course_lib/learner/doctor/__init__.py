"""``course doctor``: what the course needs of a machine, tried out: fine, or what to do.

- `finding`: what one look has found
- `software`: Python, PyTorch, kernels, JupyterLab's extensions
- `machine`: cores, memory, disk, GPUs, network
- `ranks`: ranks are started, and add up a tensor
- `sandbox`: what grading needs: bubblewrap, namespaces, control groups; and right grades
- `report`: all looks in their order, as text and as JSON
"""

from course_lib.learner.doctor.report import DESCRIPTION, add_options, run

__all__ = ["DESCRIPTION", "add_options", "run"]
