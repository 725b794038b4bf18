"""The course: lessons that run, exercises that are examined, questions with answers.

lessons/        one file each: text, code, exercise (lesson.py says how)
lesson.py       reads them, and interview questions, of interview/ and of the lessons
exercises.py    what a learner gets to write, or to repair: right code with one fault planted
study.py        a learner's folder: exercises laid into it, checked, taken up again; what was done
rendering.py    a lesson run, as a notebook, its formulas in a terminal
html_text.py    texts and code of lessons as HTML
slides.py       the slides of a lesson
lesson_plan.py  the plan of a session
handout.py      a page of A4 for learners
"""
