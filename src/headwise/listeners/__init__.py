"""Watching a model at work: what each of its heads does, what happens without it, how to take it out."""
