"""The desk: many files, judged by weights and inputs that are drawn once their code has said its piece.

template.py     the parent's end of the one process that imports torch, and is copied twice for each file
judge.py        the copy that judges: what is said before a file runs, what its code is asked, the report
secrets.py      of the judge: these numbers, drawn afterwards; whether the answers are the recipe's
conditions.py   from the source alone: what must have been asked; what the task requires
submissions.py  which files there are, a report on each; the table, CSV, lines of JSON, the class in numbers
"""
