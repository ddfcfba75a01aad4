"""``course doctor``: test what the course needs of a machine, and say what to do if it fails.

- `finding`: the result of one test
- `software`: Python, PyTorch, kernels, JupyterLab's extensions
- `machine`: cores, memory, disk, GPUs, network
- `ranks`: starts ranks that add up a tensor
- `sandbox`: what grading needs: bubblewrap, namespaces, control groups; and right grades
- `report`: runs all tests in order and prints them as text or as JSON
"""

from course_lib.learner.doctor.report import DESCRIPTION, add_options, run

__all__ = ["DESCRIPTION", "add_options", "run"]
