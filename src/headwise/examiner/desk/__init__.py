"""The desk: many files, judged by weights and inputs that are drawn once their code has said its piece.

template.py      the parent's end of the one process that imports torch, and is copied for each file
replies.py       in a copy: the learner's code with other numbers in it, and what it answers
secrets.py       in the parent: these numbers, drawn afterwards; whether the answers are the recipe's
conditions.py    in the parent, from the source alone: what must have been asked
requirements.py  what the task says about masks, heads and weights
submissions.py   which files there are, a report on each, several at a time
table.py         the table, CSV, lines of JSON, and the class in numbers
"""
