"""Running the learner's code: how it is built and called, where its weights are, what it answers."""
