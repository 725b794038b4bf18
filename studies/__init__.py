"""What was done to trained models, and what came of it: `python -m studies.NAME`; JSON in results/."""
