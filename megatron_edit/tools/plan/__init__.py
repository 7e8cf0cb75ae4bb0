"""What a training would need of memory and network, before it is started. Pure computation."""
