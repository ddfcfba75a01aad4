"""Judges that several assignments need.

- `chance`: random results, judged by counting
"""
