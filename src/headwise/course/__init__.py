"""The course: lessons that run, exercises that are examined, questions with answers.

lessons/NN_name.py    one lesson each, text and code and exercise (lesson.py says how)
lesson.py             reads them
running.py            runs one: what its cells print and show
exercises.py          what a learner gets to write or to repair; what is left to write in it
plants.py             repairs: right code with one fault planted
deck.py               interview questions
notebooks.py          a lesson as a notebook
progress.py           what a learner has done, in one small file
"""
