"""What scripts/quickstart.py is made of."""
