"""Packages, so that equal file names do not clash and every test finds `tests.helpers`."""
