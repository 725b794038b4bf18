"""Studies of trained models: `python -m studies.NAME` measures, and stores JSON in results/."""
