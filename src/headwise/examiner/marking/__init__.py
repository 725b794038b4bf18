"""Marking: check many files with weights and inputs that are drawn after the learner's code has run.

template.py     the parent's end of the one process that imports torch, and is copied twice for each file
judge.py        the copy that judges: what is said before a file runs, what its code is asked, the report
secrets.py      of the judge: these numbers, drawn afterwards; whether the answers are the recipe's
conditions.py   from the source alone: what must have been asked; what the task requires
submission_files.py  which files a submission may read: a flat folder is shared by many
submissions.py  which files there are, a report on each; the table, CSV, lines of JSON, the class in numbers
likeness.py     how many tokens of one file are another's, names aside
rubric.py       points by fault and by step
feedback.py     a Markdown file for each submission, and one for the class
"""
