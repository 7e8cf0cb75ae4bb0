"""What is verified: that replicas hold the same (drift), and that numbers are finite."""
