"""The course: lessons that run, exercises that are examined, questions with answers.

lessons/              one file each: text, code, exercise (lesson.py says how)
lesson.py             reads them
running.py            runs one: what its cells print and show
exercises.py          what a learner gets to write or to repair; what is left to write in it
terms.py              whether right code is what an exercise asks
plants.py             repairs: right code with one fault planted
deck.py               interview questions, of interview/ and of the lessons
study.py              a learner's folder: exercises laid into it, checked, taken up again
formulas.py           formulas for a terminal
lesson_notebooks.py   a lesson as a notebook
progress.py           what a learner has done, in one small file
"""
