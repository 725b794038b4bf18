"""A `Report` for eyes and for programs: plain text, terminal, notebook, JSON.

What is said is decided once, in `in_words.tell`; the others only set it. So a hint gives away the same
everywhere, and nothing the learner wrote reaches a screen unless it was made harmless there.
"""

from .for_graders import as_json
from .in_notebook import as_html
from .in_terminal import print_to
from .in_text import as_text

__all__ = ["as_html", "as_json", "as_text", "print_to"]
