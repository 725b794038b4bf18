"""The desk: many files, judged by weights and inputs that are drawn once their code has said its piece.

template.py     the parent's end of the one process that imports torch, and is copied for each file
secrets.py      in the parent: these numbers, drawn afterwards; whether the answers are the recipe's
conditions.py   in the parent, from the source alone: what must have been asked; what the task requires
submissions.py  which files there are, a report on each; the table, CSV, lines of JSON, the class in numbers
"""
