"""Running a learner's file in a process of its own, fenced in."""
