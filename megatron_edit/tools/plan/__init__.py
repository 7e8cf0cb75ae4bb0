"""Prediction of memory, traffic and speed of a training before its start. Pure computation."""
