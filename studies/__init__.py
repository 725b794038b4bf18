"""What was done to trained models, with results as JSON: `python -m studies.NAME`."""
