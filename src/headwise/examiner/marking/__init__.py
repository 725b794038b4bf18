"""Marking: check many files with weights and inputs that are drawn after the learner's code has run.

template.py          the process that imports torch once and is copied twice for each file
judge.py             the copy that judges: checks before a file runs, hidden probes, the report
hidden_probes.py     weights and inputs drawn after the examination, and the verdict on the answers
requirements.py      what a task requires, and what the source says about how to call the code
submission_files.py  the files that a submission may read
submissions.py       collect files and report on each; table, CSV, JSON lines, the class in numbers
similarity.py        the share of a file's tokens that another file contains, apart from names
rubric.py            points by fault and by step
feedback.py          a Markdown file for each submission, and one for the class
"""
