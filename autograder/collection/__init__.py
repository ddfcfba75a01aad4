"""Read and vet submissions from any source, and put them where nbgrader looks for them.

``nbgrader zip_collect`` cannot do this: it unpacks archives to the disk without a limit, finds
students by one pattern in a file's name, and knows no class list and no earlier submission.
"""
