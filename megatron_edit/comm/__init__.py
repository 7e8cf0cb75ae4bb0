"""Replica worlds: who is where, the sync groups between replicas, and what travels on them."""
