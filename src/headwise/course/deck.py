"""Placeholder until the deck is merged."""


def deck(level=None, lesson=None):
    return ()


def computed(question):
    return ""
