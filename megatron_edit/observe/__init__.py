"""What people read: event files, console lines, later pictures."""
