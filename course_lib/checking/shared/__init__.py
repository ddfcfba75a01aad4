"""Inputs, programs and judges that several assignments need.

- `memory`: whether parameters keep their memory
- `chance`: random results, judged by counting
"""
