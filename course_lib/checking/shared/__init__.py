"""Inputs, programs and judges that several assignments need.

- `memory`: whether parameters keep their memory
- `averaging`, `training`: means over a group, and training steps that use them
- `chance`: random results, judged by counting
"""
