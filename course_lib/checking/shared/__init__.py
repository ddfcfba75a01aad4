"""Inputs, programs and judges that several assignments need.

- `memory`: whether parameters stay where they are
- `averaging`, `training`: means over a group, and steps of training that use them
- `sums`: exact sums of what the ranks of a group have
"""
