"""What is verified: equal replicas, finite numbers, norms."""
