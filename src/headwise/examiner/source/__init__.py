"""What can be said of a learner's source without running it."""
