"""Output for users: event files, console lines and metrics."""
