"""Parts of scripts/quickstart.py."""
