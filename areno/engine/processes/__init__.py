"""Worker processes: how they start, meet each other, get commands and end."""
